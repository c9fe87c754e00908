#include "apps/pack/runs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/common/bshd_rows.hpp"
#include "apps/common/packed_streams.hpp"
#include "apps/pack/inputs.hpp"
#include "apps/pack/more_labels.hpp"
#include "comm/agree.hpp"
#include "harness/backend.hpp"
#include "io/outputs.hpp"
#include "io/schemas/batch_file.hpp"
#include "packing/lengths.hpp"
#include "packing/padding.hpp"
#include "report/verify.hpp"

namespace gyre {
namespace {

/// Streams that are padded for another multiple.
struct RepaddedStreams {
  PackedHeader header;
  PackedSlots slots;
};

std::vector<int64_t> widths(std::span<const int32_t> bounds) {
  std::vector<int64_t> lengths;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) lengths.push_back(bounds[i + 1] - bounds[i]);
  return lengths;
}

/// Checks that documents begin at their multiples and that streams have the requested lengths.
void check_rounded(Check& check, const RoundedStream& stream, const std::vector<int64_t>& lengths,
                   const RoundOptions& options, int64_t bin) {
  int64_t needed = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto where = [&] { return fmt::format("stream {} segment {}", bin, i); };
    check.add(stream.cu_seqlens[i + 1] - stream.cu_seqlens[i], lengths[i], where);
    check.add(stream.cu_seqlens_padded[i], needed, where);
    needed += (lengths[i] + options.multiple - 1) / options.multiple * options.multiple;
  }
  const int64_t unit = options.stream_multiple;
  const int64_t slots =
      options.stream_slots > 0 ? options.stream_slots : (needed + unit - 1) / unit * unit;
  check.add(stream.cu_seqlens_padded.back(), slots,
            [&] { return fmt::format("slots of stream {}", bin); });
}

/// One bin out of all slots, without its padding.
struct Gapless {
  std::vector<int64_t> ids, labels;
};
Gapless without_padding(const PackedHeader& header, const PackedSlots& slots, int64_t bin) {
  const auto real = header.cu_seqlens(bin), padded = header.cu_seqlens_padded(bin);
  const int64_t first = header.slot_offsets()[bin];
  Gapless stream;
  for (size_t i = 0; i + 1 < real.size(); ++i)
    for (int64_t t = first + padded[i]; t < first + padded[i] + real[i + 1] - real[i]; ++t) {
      stream.ids.push_back(slots.ids[t]);
      stream.labels.push_back(slots.labels[t]);
    }
  return stream;
}

/// Moves the extras of a bin's real tokens to its segments at `to`.
void move_extras(const PackedHeader& header, const PackedSlots& slots, int64_t bin,
                 std::span<const int32_t> to, PackedSlots& repadded) {
  const auto real = header.cu_seqlens(bin), from = header.cu_seqlens_padded(bin);
  const int64_t first = header.slot_offsets()[bin];
  for (const auto& [name, extra] : slots.extras) {
    ExtraSlots& moved = repadded.extras[name];
    const int64_t width = moved.item_bytes = extra.item_bytes, begin = std::ssize(moved.bytes);
    moved.fill = extra.fill;
    const std::vector<std::byte> blank = extra.padding(to.back()).bytes;
    moved.bytes.insert(moved.bytes.end(), blank.begin(), blank.end());
    for (size_t i = 0; i + 1 < real.size(); ++i)
      std::copy_n(extra.bytes.begin() + (first + from[i]) * width, (real[i + 1] - real[i]) * width,
                  moved.bytes.begin() + begin + to[i] * width);
  }
}

/// Checks the extras of one slot: those of the old slot if `held`, else padding.
void check_moved_extras(Check& check, const PackedSlots& slots, const PackedSlots& repadded,
                        bool held, size_t there, size_t here) {
  for (const auto& [name, extra] : slots.extras) {
    const std::vector<std::byte>& moved = repadded.extras.at(name).bytes;
    const size_t width = extra.item_bytes;
    for (size_t k = 0; k < width; ++k)
      check.add(
          static_cast<double>(moved[here * width + k]),
          static_cast<double>(held ? extra.bytes[there * width + k] : padding_byte(extra.fill, k)),
          [&, &name = name] { return fmt::format("extra {} slot {} byte {}", name, here, k); });
  }
}

/// Moves the positions of a bin's real tokens to its segments at `to`; they go on in padding.
void move_positions(const PackedHeader& header, const PackedSlots& slots, int64_t bin,
                    std::span<const int32_t> to, std::vector<int32_t>& moved) {
  const auto real = header.cu_seqlens(bin), from = header.cu_seqlens_padded(bin);
  const int64_t first = header.slot_offsets()[bin], axes = header.position_axes;
  for (size_t i = 0; i + 1 < real.size(); ++i) {
    const size_t begin = moved.size();
    const int64_t tokens = real[i + 1] - real[i];
    const auto old = slots.positions.begin() + (first + from[i]) * axes;
    moved.insert(moved.end(), old, old + tokens * axes);
    count_on(moved, begin, to[i + 1] - to[i] - tokens, axes);
  }
}

/// Checks every slot: the segment's old content, then padding; positions continue in it.
void check_repadded(Check& check, const PackedHeader& header, const PackedSlots& slots,
                    const RepaddedStreams& repadded) {
  const std::vector<int64_t> old_first = header.slot_offsets();
  const std::vector<int64_t> new_first = repadded.header.slot_offsets();
  const size_t axes = header.position_axes;
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const auto real = header.cu_seqlens(b), from = header.cu_seqlens_padded(b);
    const auto to = repadded.header.cu_seqlens_padded(b);
    for (size_t i = 0; i + 1 < to.size(); ++i)
      for (int64_t p = 0; p < to[i + 1] - to[i]; ++p) {
        const bool held = p < real[i + 1] - real[i];
        const size_t there = old_first[b] + from[i] + p;
        const size_t here = new_first[b] + to[i] + p;
        const auto where = [&] { return fmt::format("bin {} segment {} slot {}", b, i, p); };
        check.add(repadded.slots.ids[here], held ? slots.ids[there] : 0, where);
        check.add(repadded.slots.labels[here], held ? slots.labels[there] : ignored_label, where);
        for (size_t a = 0; a < axes; ++a) {
          const int32_t* now = &repadded.slots.positions[here * axes + a];
          const int32_t next = p == 0 ? 0 : *(now - axes) + 1;
          check.add(*now, held ? slots.positions[there * axes + a] : next, where);
        }
        check_moved_extras(check, slots, repadded.slots, held, there, here);
      }
  }
}

/// Replaces the padding of the streams: every segment, even one without tokens, gets a multiple of
/// `multiple` slots (pad_thd_sequences). Extras of slots move with their tokens. Adds to `checks`
/// that each segment keeps its content, with padding after it. Throws a usage error for streams of
/// embeddings.
RepaddedStreams repad_streams(const PackedHeader& header, const PackedSlots& slots,
                              int64_t multiple, Verification& checks) {
  if (header.hidden_size > 0)
    throw_usage("--repad pads ids; these streams hold embeddings of {}", header.hidden_size);
  if (!header.bins.prefixes.empty())
    throw_usage(
        "--repad pads documents; these streams hold trees of them (--share-prefixes): unpack them, "
        "and pack them for another --cp");
  RepaddedStreams result;
  result.header = header;
  result.header.bins = {};
  result.header.slot_multiple = multiple;
  const auto append = [](std::vector<int32_t>& all, const std::vector<int64_t>& part) {
    for (const int64_t value : part) all.push_back(static_cast<int32_t>(value));
  };
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const Gapless stream = without_padding(header, slots, b);
    const auto real = header.cu_seqlens(b);
    const PaddedSequences padded = pad_thd_sequences(stream.ids, stream.labels, real, multiple);
    const std::vector<int64_t> documents(header.documents_of(b).begin(),
                                         header.documents_of(b).end());
    PackedBins& bins = result.header.bins;
    bins.add_bin(documents, real, padded.cu_seqlens_padded);
    bins.bin_capacity = std::max<int64_t>(bins.bin_capacity, padded.cu_seqlens_padded.back());
    append(result.slots.ids, padded.ids);
    append(result.slots.labels, padded.labels);
    move_positions(header, slots, b, result.header.cu_seqlens_padded(b), result.slots.positions);
    move_extras(header, slots, b, result.header.cu_seqlens_padded(b), result.slots);
  }
  Check& check = checks.check("repadded", 0);
  if (result.slots.ids.empty()) check.add_nothing();
  check_repadded(check, header, slots, result);
  return result;
}

/// Rows of documents, and the packing that made them.
struct DocumentRows {
  BshdArrays arrays;
  RowPacking packing;
  PackingResult row;  ///< row of the table
};

/// Appends tokens, labels and positions of one row.
void append_row(BshdArrays& arrays, const PackedRow& row, const TokenSource& tokens) {
  std::vector<int32_t> bounds{0};
  for (size_t i = 0; i < row.samples.size(); ++i) {
    for (int64_t p = 0; p < row.seq_lens_padded[i]; ++p) {
      const bool real = p < row.seq_lens[i], has_next = p + 1 < row.seq_lens[i];
      arrays.ids.push_back(real ? tokens(row.samples[i], p) : 0);
      arrays.labels.push_back(has_next ? tokens(row.samples[i], p + 1) : ignored_label);
    }
    bounds.push_back(bounds.back() + static_cast<int32_t>(row.seq_lens_padded[i]));
  }
  const std::vector<int64_t> positions = packed_positions(bounds, arrays.slots - 1);
  arrays.positions.insert(arrays.positions.end(), positions.begin(), positions.end());
}

/// Packs documents of `lengths` in order into rows of options.row slots (packing/padding.hpp:
/// pack_rows). Labels are the next tokens of the document. Positions continue through a segment's
/// padding up to at most options.row - 1. Throws the usage errors of pack_rows.
DocumentRows make_rows(std::span<const int64_t> lengths, const RowPackOptions& options,
                       const TokenSource& tokens, int64_t vocab_size) {
  DocumentRows made;
  made.packing = pack_rows(lengths, options);
  const LengthTables tables = length_tables(made.packing.rows);
  BshdArrays& arrays = made.arrays;
  arrays.rows = std::ssize(made.packing.rows);
  arrays.slots = options.row;
  arrays.vocab_size = vocab_size;
  arrays.sentinel = length_sentinel;
  arrays.segments_per_row = tables.seq_lens.columns;
  arrays.seq_lens = tables.seq_lens.cells;
  arrays.seq_lens_padded = tables.seq_lens_padded.cells;
  std::vector<Bin> bins;
  for (const PackedRow& row : made.packing.rows) {
    append_row(arrays, row, tokens);
    bins.push_back(row.samples);
  }
  made.row.algorithm = "rows";
  made.row.items = std::ssize(lengths) - std::ssize(made.packing.dropped);
  made.row.measures = measure_bins(bins, lengths, options.row, options.cp > 1 ? 2 * options.cp : 1);
  for (const Bin& bin : bins)
    for (const int64_t item : bin) made.row.longest = std::max(made.row.longest, lengths[item]);
  made.row.time_ms.median = std::nan("");
  return made;
}

/// Checks that every document that was not dropped is in one segment with its tokens, labels and
/// positions, that segments are multiples of 2·cp slots and fill their row, and that the batch
/// converts into a stream with these documents (to_thd).
void check_rows(const DocumentRows& rows, std::span<const int64_t> lengths,
                const RowPackOptions& options, const TokenSource& tokens, Verification& checks) {
  const BshdArrays& arrays = rows.arrays;
  Check& once = checks.check("documents in one row", 0);
  Check& full = checks.check("rows are full", 0);
  Check& contents = checks.check("contents of rows", 0);
  const int64_t unit = options.cp > 1 ? 2 * options.cp : 1;
  std::vector<int64_t> times(lengths.size(), 0), expected(lengths.size(), 1);
  for (const int64_t dropped : rows.packing.dropped) expected[dropped] = 0;
  for (size_t r = 0; r < rows.packing.rows.size(); ++r) {
    const PackedRow& row = rows.packing.rows[r];
    int64_t begin = 0;
    for (size_t i = 0; i < row.samples.size(); ++i) {
      const int64_t document = row.samples[i], length = lengths[document];
      const auto cell = r * static_cast<size_t>(arrays.segments_per_row) + i;
      const int64_t slots = (*arrays.seq_lens_padded)[cell];
      const auto where = [&] { return fmt::format("row {} segment {}", r, i); };
      ++times[document];
      full.add((*arrays.seq_lens)[cell], length, where);
      full.add(slots % unit, 0, where);
      for (int64_t p = 0; p < slots; ++p) {
        const auto t = r * static_cast<size_t>(arrays.slots) + static_cast<size_t>(begin + p);
        const int64_t id = p < length ? tokens(document, p) : 0;
        const int64_t label = p + 1 < length ? tokens(document, p + 1) : ignored_label;
        contents.add(arrays.ids[t], id, where);
        contents.add(arrays.labels[t], label, where);
        contents.add(arrays.positions[t], p, where);
      }
      begin += slots;
    }
    full.add(begin, options.row, [&] { return fmt::format("row {}", r); });
  }
  once.add_all(times, expected, "document");
  const ThdBatch stream = to_thd(batch_of(arrays), {.tail = Tail::keep, .slot_multiple = unit});
  full.add(count_real_tokens(stream.padding_mask), rows.row.measures.tokens,
           [] { return "tokens of the stream"; });
}

/// Writes the rows to `path`, one of the `outputs`. With `check`, reads them back and compares
/// them. Collective.
void write_rows(const std::string& path, const BshdArrays& arrays, const Provenance& provenance,
                Communicator& world, bool check, Verification& checks, Outputs& outputs) {
  OutputFile output(world, path);
  fill_bshd(output, arrays, provenance);
  if (check) {
    Check& same = checks.check("rows read back", 0);
    const BshdArrays read = read_bshd(world, output.temporary_path());
    same.add_all(read.ids, arrays.ids, "input_ids");
    same.add_all(read.labels, arrays.labels, "labels");
    same.add_all(read.positions, arrays.positions, "position_ids");
    same.add_all(read.seq_lens.value(), *arrays.seq_lens, "seq_lens");
    same.add_all(read.seq_lens_padded.value(), *arrays.seq_lens_padded, "seq_lens_padded");
  }
  outputs.add(std::move(output));
}

}  // namespace

void round_streams(PackedHeader& header, const RoundOptions& options, Verification& checks) {
  Check& check = checks.check("rounded streams", 0);
  if (header.bin_count() == 0) check.add_nothing();
  PackedBins bins;
  bins.bin_capacity = header.bins.bin_capacity;
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const std::vector<int64_t> lengths = widths(header.cu_seqlens(b));
    RoundedStream stream;
    try {
      stream = round_sequences(lengths, options);
    } catch (const Error& error) {
      throw_usage("stream {}: {}", b, error.what());
    }
    check_rounded(check, stream, lengths, options, b);
    std::vector<int64_t> documents(header.documents_of(b).begin(), header.documents_of(b).end());
    if (documents.size() + 1 < stream.cu_seqlens.size()) {
      if (!header.names.empty()) header.names.push_back(fmt::format("padding of stream {}", b));
      documents.push_back(header.documents++);
    }
    bins.add_bin(documents, stream.cu_seqlens, stream.cu_seqlens_padded);
    bins.bin_capacity = std::max<int64_t>(bins.bin_capacity, stream.cu_seqlens_padded.back());
  }
  header.bins = std::move(bins);
}

void add_checked_row(PackingResult row, RunReport& report, Outcome& outcome) {
  row.check = check_text(report, report.verification);
  add_row(report, row);
  outcome.rows.push_back(row);
}

void write_on_root(const PackOptions& o, const PackedHeader& header, const PackedSlots& slots,
                   AppContext& context, RunReport& report, const PackedSlots* expected) {
  const PackedSlots nothing;
  const PackedSlots& mine = context.root() ? slots : nothing;
  const bool own = !context.root() || expected == nullptr;
  write_checked({.path = o.output,
                 .header = header,
                 .mine = mine,
                 .expected = own ? mine : *expected,
                 .first = 0,
                 .last = context.root() ? header.bin_count() : 0,
                 .check = o.check != "none"},
                context.world, report.verification, context.outputs);
}

void pack_into_rows(const PackOptions& o, AppContext& context, RunReport& report,
                    Outcome& outcome) {
  Communicator& world = context.world;
  Documents documents;
  LengthSpec spec;
  DocumentRows rows;
  if (!o.input.empty()) documents = read_documents(world, o.input);
  run_agreed(world, "packing rows", [&] {
    std::vector<int64_t> lengths;
    if (o.input.empty()) lengths = draw_lengths(spec = parse_length_spec(o.generate));
    for (int64_t i = 0; i < documents.count(); ++i) lengths.push_back(documents.length(i));
    if (o.input.empty())
      check_slots_fit(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}),
                      memory_for_rank(context));
    const int64_t vocab_size = o.input.empty() ? synthetic_vocab : documents.vocab_size;
    const TokenSource tokens =
        o.input.empty() ? synthetic_tokens(spec.seed, vocab_size) : tokens_of(documents);
    const RowPackOptions options{
        o.row, o.cp, o.oversize == "drop" ? OversizeSample::drop : OversizeSample::reject};
    rows = make_rows(lengths, options, tokens, vocab_size);
    if (o.check != "none") check_rows(rows, lengths, options, tokens, report.verification);
    outcome.notes +=
        compatibility_text(o.target, o.cp, rows.arrays.seq_lens != rows.arrays.seq_lens_padded);
  });
  outcome.notes += fmt::format("# {} rows of {} slots, {} documents dropped\n", rows.arrays.rows,
                               rows.arrays.slots, rows.packing.dropped.size());
  if (!o.output.empty())
    write_rows(o.output, rows.arrays,
               provenance_of(context, o.input.empty() ? to_string(spec) : o.input), world,
               o.check != "none", report.verification, context.outputs);
  add_checked_row(rows.row, report, outcome);
}

void repad_streams(const PackOptions& o, AppContext& context, RunReport& report, Outcome& outcome) {
  Communicator& world = context.world;
  const PackedHeader header = read_packed_header(world, o.input);
  const PackedSlots slots = read_packed_slots(world, o.input, header, 0, header.bin_count());
  if (header.slot_offsets().back() == 0) report.nothing_to_verify = "no slots";
  RepaddedStreams streams;
  run_agreed(world, "padding " + o.input, [&] {
    streams = repad_streams(header, slots, o.document_multiple(), report.verification);
    add_more_labels(o, streams.header, streams.slots,
                    o.check != "none" ? &report.verification : nullptr);
  });
  outcome.notes += judgement(o, streams.header, world);
  streams.header.provenance = provenance_of(context, o.input);
  if (!o.output.empty()) write_on_root(o, streams.header, streams.slots, context, report);
  add_checked_row(measured_row(streams.header, header.algorithm), report, outcome);
}

std::string judgement(const PackOptions& o, const PackedHeader& header, Communicator& world) {
  std::string text;
  run_agreed(world, "--attention", [&] {
    text =
        compatibility_text(o.target, o.cp, header.bins.cu_seqlens != header.bins.cu_seqlens_padded);
  });
  return text;
}

void pack_batch(const PackOptions& o, const std::string& schema, AppContext& context,
                Backend& backend, RunReport& report, Outcome& outcome) {
  Communicator& world = context.world;
  ConvertedBatch batch;
  if (schema == bshd_schema) {
    const BshdArrays rows = read_bshd(world, o.input);
    batch = convert(o.input, rows, o.chunks, o.multiple(), o.tail, world, o.repeats);
    if (o.check != "none") check_converted(rows, batch, report.verification);
  } else {
    const TpRounding rounding = o.tp_rounding == "total" ? TpRounding::total : TpRounding::per_rank;
    const SalmArrays salm = read_salm(world, o.input);
    if (o.encoder.wanted()) check_arrays_fit(encoder_bytes(salm, world.size()), context);
    batch = convert(o.input, salm, {o.cp, o.tp, rounding, o.repeats, o.encoder.wanted()}, world,
                    report.verification, &backend);
  }
  run_agreed(world, "labels ahead", [&] {
    add_more_labels(o, batch.header, batch.slots,
                    o.check != "none" ? &report.verification : nullptr);
    if (batch.gathered_slots) batch.gathered_slots->extras = batch.slots.extras;
  });
  outcome.notes += batch.notes;
  outcome.notes += judgement(o, batch.header, world);
  if (batch.encoder) {
    batch.encoder->input_sha256 = checksum_of(report, o.input);
    batch.encoder->provenance = provenance_of(context, o.input);
    outcome.notes += write_and_compare(*batch.encoder, o.encoder, o.check != "none", context,
                                       report.verification);
  }
  if (!o.output.empty()) {
    batch.header.provenance = provenance_of(context, o.input);
    write_on_root(o, batch.header, batch.gathered_slots.value_or(batch.slots), context, report,
                  &batch.slots);
  }
  add_checked_row(batch.row, report, outcome);
}

}  // namespace gyre
