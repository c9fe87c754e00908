#include "apps/pack/runs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/common/bshd_rows.hpp"
#include "apps/common/packed_streams.hpp"
#include "apps/pack/report.hpp"
#include "apps/pack/streams.hpp"
#include "comm/agree.hpp"
#include "harness/backend.hpp"
#include "io/batch_file.hpp"
#include "io/outputs.hpp"
#include "packing/lengths.hpp"
#include "packing/padding.hpp"
#include "report/app.hpp"

namespace gyre {
namespace {

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

void add_checked_row(PackingResult row, RunReport& report, Outcome& outcome) {
  row.check = check_text(report, report.verification);
  add_row(report, row);
  outcome.rows.push_back(row);
}

void write_on_root(const PackOptions& o, const PackedHeader& header, const PackedSlots& slots,
                   AppContext& context, RunReport& report, const PackedSlots* expected) {
  const PackedSlots nothing;
  const PackedSlots& mine = context.root() ? slots : nothing;
  write_checked(o.output, header, mine, 0, context.root() ? header.bin_count() : 0, context.world,
                o.check != "none", report.verification, context.outputs,
                context.root() ? expected : nullptr);
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
  });
  streams.header.provenance = provenance_of(context, o.input);
  if (!o.output.empty()) write_on_root(o, streams.header, streams.slots, context, report);
  add_checked_row(measured_row(streams.header, header.algorithm), report, outcome);
}

}  // namespace gyre
