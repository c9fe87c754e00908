#include "apps/pack/inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "apps/common/bshd_rows.hpp"
#include "apps/common/extras.hpp"
#include "comm/agree.hpp"
#include "report/verify.hpp"

namespace gyre {
namespace {

/// Appends the extras of a stream to those of the streams before it.
void append_extras(ConvertedBatch& batch, const Extras& extras, const StoredExtras& of_file) {
  for (const auto& [name, extra] : extras) {
    const auto [known, is_first] = batch.header.extras.emplace(name, of_file.at(name));
    Extra& all = known->second.extra;
    if (extra.aligned == Extra::Aligned::none) continue;
    if (extra.aligned == Extra::Aligned::slots) {
      all.bytes = nullptr;
      ExtraSlots& slots = batch.slots.extras[name];
      slots.item_bytes = extra.item_bytes;
      slots.fill = extra.fill;
      append(slots.bytes, *extra.bytes);
      continue;
    }
    std::vector<std::byte> rows;
    if (!is_first) rows = *all.bytes;
    append(rows, *extra.bytes);
    all.bytes = std::make_shared<const std::vector<std::byte>>(std::move(rows));
  }
}

/// Checks that extras equal the file's. Slot t is slot t mod S of row t / S (S slots a row).
void check_extras(Check& check, const BshdArrays& batch, const ConvertedBatch& converted) {
  for (const auto& [name, stored] : batch.extras) {
    const std::vector<std::byte>& from = *stored.extra.bytes;
    if (stored.extra.aligned != Extra::Aligned::slots) {
      compare_bytes(check, *converted.header.extras.at(name).extra.bytes, from, name);
      continue;
    }
    const std::vector<std::byte>& slots = converted.slots.extras.at(name).bytes;
    const size_t width = stored.extra.item_bytes;
    const size_t row_slots = batch.slots;
    if (slots.size() != from.size()) {
      check.add_failure(fmt::format("{}: {} bytes, not {}", name, slots.size(), from.size()));
      continue;
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      const size_t t = i / width, row = t / row_slots, slot = t % row_slots;
      check.add(static_cast<double>(slots[i]),
                static_cast<double>(from[(row * row_slots + slot) * width + i % width]),
                [&, &name = name] {
                  return fmt::format("{} row {} slot {} byte {}", name, row, slot, i % width);
                });
    }
  }
  if (check.count() == 0) check.add_nothing();
}

/// Checks that positions equal the file's on each axis. Slot t is slot t mod S of row t / S.
void check_positions(Check& check, const BshdArrays& batch, const PackedSlots& slots) {
  if (slots.positions.size() != batch.positions.size())
    return check.add_failure(
        fmt::format("{} positions, not {}", slots.positions.size(), batch.positions.size()));
  for (int64_t axis = 0; axis < batch.position_axes; ++axis)
    for (int64_t row = 0; row < batch.rows; ++row)
      for (int64_t t = 0; t < batch.slots; ++t) {
        const int64_t slot = row * batch.slots + t;
        check.add(slots.positions[slot * batch.position_axes + axis],
                  batch.positions[(axis * batch.rows + row) * batch.slots + t],
                  [&] { return fmt::format("axis {} row {} slot {}", axis, row, t); });
      }
  if (check.count() == 0) check.add_nothing();
}

/// Checks the documents of rows without tables: the ids before the padding at the end of each row.
void check_documents(Check& check, const BshdArrays& batch, const PackedHeader& header) {
  std::vector<int64_t> expected, tokens(batch.rows, 0);
  for (int64_t row = 0; row < batch.rows; ++row) {
    int64_t end = batch.slots;
    while (end > 0 && batch.ids[row * batch.slots + end - 1] == *batch.pad_id) --end;
    expected.push_back(end);
  }
  const std::vector<int64_t> first = header.slot_offsets();
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const auto real = header.cu_seqlens(b), padded = header.cu_seqlens_padded(b);
    for (size_t i = 0; i + 1 < real.size(); ++i) {
      if (real[i + 1] == real[i]) continue;
      const int64_t slot = first[b] + padded[i];
      tokens[slot / batch.slots] += real[i + 1] - real[i];
      check.add(slot % batch.slots, 0,
                [&] { return fmt::format("begin of stream {} segment {}", b, i); });
    }
  }
  check.add_all(tokens, expected, "tokens of row");
  if (check.count() == 0) check.add_nothing();
}

ConvertedBatch convert_rows(const BshdArrays& batch, int64_t chunks, const ThdOptions& options) {
  BshdBatch input = batch_of(batch);
  if (!input.seq_lens) add_tables_of_rows(input, batch, chunks);
  ConvertedBatch converted;
  converted.header.slot_multiple = options.slot_multiple;
  converted.header.vocab_size = batch.vocab_size;
  converted.header.hidden_size = batch.hidden;
  converted.header.position_axes = batch.position_axes;
  converted.header.tokenizer = "unknown";
  converted.header.algorithm = "bshd";
  int64_t real_tokens = 0, supervised = 0;
  const std::vector<ThdBatch> streams = split_into_chunks(input, chunks, options);
  check_labels(batch);
  // Puts the boundaries of all streams in one table, like the micro-batches of a pipeline. Its rows
  // end in sentinels, which are stripped before use.
  const ChunkBounds stacked = stack_chunk_bounds(streams);
  for (size_t c = 0; c < streams.size(); ++c) {
    const ThdBatch& stream = streams[c];
    const int64_t chunk = c;
    const auto real = strip_sentinels(stacked.cu_seqlens.row(chunk));
    const auto padded =
        stacked.cu_seqlens_padded ? strip_sentinels(stacked.cu_seqlens_padded->row(chunk)) : real;
    const SegmentBounds bounds{real, padded};
    add_stream(converted, {real.begin(), real.end()}, {padded.begin(), padded.end()}, stream.slots);
    PackedSlots& slots = converted.slots;
    append(slots.labels, narrow(stream.labels));
    append(slots.positions,
           transposed(narrow(stream.positions->values), batch.position_axes, stream.slots));
    if (const auto* ids = std::get_if<TokenIds>(&stream.inputs))
      append(slots.ids, narrow(*ids));
    else
      append(slots.embeddings, std::get<TokenEmbeddings>(stream.inputs).values);
    append_extras(converted, stream.extras, batch.extras);
    real_tokens += count_real_tokens(stream.padding_mask);
    supervised += count_supervised_tokens(stream.labels);
    converted.notes += fmt::format(
        "# stream {}: {} segments, {} slots, max_seqlen {}{}\n", converted.header.bin_count() - 1,
        bounds.segments(), stream.slots, stacked.max_seqlen[c],
        stream.absorbed ? ", trailing padding absorbed by the last segment" : "");
  }
  converted.row = measured_row(converted.header, "bshd");
  converted.notes += fmt::format("# tokens {} real by the padding mask, {} with a label\n",
                                 real_tokens, supervised);
  converted.notes += extras_text(batch.extras);
  return converted;
}

}  // namespace

std::vector<int32_t> narrow(const std::vector<int64_t>& values) {
  std::vector<int32_t> narrow;
  narrow.reserve(values.size());
  for (const int64_t value : values) narrow.push_back(static_cast<int32_t>(value));
  return narrow;
}

void add_stream(ConvertedBatch& batch, std::vector<int32_t> real, std::vector<int32_t> padded,
                int64_t slots) {
  PackedHeader& header = batch.header;
  if (padded.back() < slots) {
    real.push_back(real.back());
    padded.push_back(static_cast<int32_t>(slots));
  }
  std::vector<int64_t> documents(real.size() - 1);
  for (int64_t& document : documents) document = header.documents++;
  header.bins.add_bin(documents, real, padded);
  header.bins.bin_capacity = std::max(header.bins.bin_capacity, slots);
}

void run_on_file(Communicator& world, const std::string& file, const std::function<void()>& work) {
  run_agreed(world, "converting " + file, [&] {
    try {
      work();
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      throw_usage("'{}': {}", file, error.what());
    }
  });
}

ConvertedBatch convert(const std::string& file, const BshdArrays& batch, int64_t chunks,
                       int64_t slot_multiple, const std::string& tail, Communicator& world,
                       const RepeatOptions& repeats) {
  ThdOptions options;
  options.sentinel = batch.sentinel;
  options.slot_multiple = slot_multiple;
  options.tail = tail_of(batch, tail);
  ConvertedBatch converted;
  run_on_file(world, file, [&] {
    Repeats times(repeats, nullptr);
    while (times.next()) times.time([&] { converted = convert_rows(batch, chunks, options); });
    set_times(converted.row, times, repeats);
  });
  return converted;
}

void check_converted(const BshdArrays& batch, const ConvertedBatch& converted,
                     Verification& checks) {
  if (!batch.extras.empty()) check_extras(checks.check("extras", 0), batch, converted);
  if (batch.position_axes > 1)
    check_positions(checks.check("positions of axes", 0), batch, converted.slots);
  if (!batch.seq_lens)
    check_documents(checks.check("documents of rows", 0), batch, converted.header);
}

}  // namespace gyre
