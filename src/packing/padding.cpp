#include "packing/padding.hpp"

#include <algorithm>
#include <numeric>

#include "core/error.hpp"
#include "core/index.hpp"
#include "packing/bins.hpp"

namespace gyre {
namespace {

/// Appends a boundary `length` slots after the last one.
void extend(std::vector<int32_t>& bounds, int64_t length) {
  if (length > max_slots - bounds.back())
    throw_usage(
        "segment {}: {} slots after slot {} exceed the int32 range of cu_seqlens; at most {} fit",
        std::ssize(bounds) - 1, length, bounds.back(), max_slots - bounds.back());
  bounds.push_back(bounds.back() + static_cast<int32_t>(length));
}

void check_length(int64_t length, size_t i, const char* what) {
  if (length < 0) throw_usage("{} {}: length {} is negative; the least is 0", what, i, length);
  if (length > max_slots)
    throw_usage("{} {}: length {} exceeds the int32 range of cu_seqlens; the largest is {}", what,
                i, length, max_slots);
}

/// Throws unless `value` is a positive multiple of `unit` that an int32 boundary can reach.
void check_multiple(const char* what, int64_t value, int64_t unit, const char* unit_name) {
  if (value > max_slots)
    throw_usage("{} {} exceeds the int32 range of cu_seqlens; the largest is {}", what, value,
                max_slots / unit * unit);
  if (value >= unit && value % unit == 0) return;
  const int64_t above = round_up(std::max<int64_t>(value, 1), unit);
  const std::string nearest = value > unit
                                  ? fmt::format("the nearest are {} and {}", above - unit, above)
                                  : fmt::format("the least is {}", unit);
  throw_usage("{} {} is not a positive multiple of {} ({}); {}", what, value, unit, unit_name,
              nearest);
}

int64_t chunk_unit(int cp) {
  if (cp < 1) throw_usage("cp must be at least 1, not {}", cp);
  return cp > 1 ? int64_t{2} * cp : 1;
}

/// Extends the last sample of the row by the remaining room.
void close_row(RowPacking& packing, int64_t room) {
  if (!packing.rows.empty()) packing.rows.back().seq_lens_padded.back() += room;
}

void check_round_options(const RoundOptions& options) {
  if (options.tp < 1) throw_usage("tp must be at least 1, not {}", options.tp);
  const int64_t unit = chunk_unit(options.cp) * options.tp;
  check_multiple("the multiple of sequence lengths", options.multiple, unit, "2·cp·tp");
  if (options.stream_slots == 0) {
    if (options.stream_multiple != 1)
      check_multiple("the multiple of the stream", options.stream_multiple, unit, "2·cp·tp");
  } else {
    if (options.stream_multiple != 1)
      throw_usage("the stream cannot have both a fixed length ({}) and a multiple ({})",
                  options.stream_slots, options.stream_multiple);
    check_multiple("the length of the stream", options.stream_slots, unit, "2·cp·tp");
  }
}

}  // namespace

std::vector<int32_t> pad_boundaries(std::span<const int32_t> cu, int64_t multiple) {
  if (multiple < 1) throw_usage("the multiple must be at least 1, not {}", multiple);
  if (cu.empty() || cu.front() != 0)
    throw_usage("cu_seqlens must start at 0; it {}",
                cu.empty() ? "is empty" : fmt::format("starts at {}", cu.front()));
  std::vector<int32_t> padded = {0};
  for (size_t i = 0; i + 1 < cu.size(); ++i) {
    if (cu[i + 1] < cu[i])
      throw_usage("segment {}: cu_seqlens falls from {} to {}; it must not decrease", i, cu[i],
                  cu[i + 1]);
    // The limit keeps round_up from overflowing; any larger multiple is rejected as well.
    extend(padded, round_up(cu[i + 1] - cu[i], std::min(multiple, max_slots + 1)));
  }
  return padded;
}

PaddedSequences pad_thd_sequences(std::span<const int64_t> ids, std::span<const int64_t> labels,
                                  std::span<const int32_t> cu, int64_t multiple, int64_t pad_id,
                                  int64_t pad_label) {
  PaddedSequences out;
  out.cu_seqlens_padded = pad_boundaries(cu, multiple);
  if (std::ssize(ids) != cu.back() || std::ssize(labels) != cu.back())
    throw_usage("{} ids and {} labels; cu_seqlens ends at {}, so both must hold {}", ids.size(),
                labels.size(), cu.back(), cu.back());
  const size_t slots = out.cu_seqlens_padded.back();
  out.ids.assign(slots, pad_id);
  out.labels.assign(slots, pad_label);
  for (size_t i = 0; i + 1 < cu.size(); ++i) {
    const size_t from = cu[i], count = cu[i + 1] - from;
    const auto to = out.cu_seqlens_padded[i];
    std::ranges::copy(ids.subspan(from, count), out.ids.begin() + to);
    std::ranges::copy(labels.subspan(from, count), out.labels.begin() + to);
  }
  return out;
}

std::vector<int64_t> packed_positions(std::span<const int32_t> bounds, int64_t largest) {
  std::vector<int64_t> positions;
  positions.reserve(bounds.empty() ? 0 : bounds.back());
  for (size_t i = 0; i + 1 < bounds.size(); ++i)
    for (int64_t p = 0; p < bounds[i + 1] - bounds[i]; ++p)
      positions.push_back(std::min(p, largest));
  return positions;
}

std::vector<int64_t> broadcast_positions(std::span<const int64_t> positions, int64_t rows,
                                         int64_t slots) {
  if (!positions.empty() && std::ssize(positions) == rows * slots)
    return {positions.begin(), positions.end()};
  std::vector<int64_t> row(positions.begin(), positions.end());
  if (row.empty()) {
    row.resize(slots);
    std::iota(row.begin(), row.end(), 0);
  }
  if (std::ssize(row) != slots)
    throw_usage("{} positions for {} rows of {} slots; {} (one row for all) or {} are needed",
                row.size(), rows, slots, slots, rows * slots);
  std::vector<int64_t> all;
  for (int64_t r = 0; r < rows; ++r) all.insert(all.end(), row.begin(), row.end());
  return all;
}

void pad_positions(std::vector<int64_t>& positions, int64_t length, PadPositions kind) {
  const int64_t held = std::ssize(positions);
  if (length < held)
    throw_usage("{} positions cannot be padded to {}; the least is {}", held, length, held);
  const int64_t next = positions.empty() ? 0 : positions.back() + 1;
  for (int64_t p = 0; p < length - held; ++p) switch (kind) {
      case PadPositions::counting:
        positions.push_back(next + p);
        break;
      case PadPositions::zero:
        positions.push_back(0);
        break;
      case PadPositions::restarted:
        positions.push_back(p);
        break;
    }
}

RowPacking pack_rows(std::span<const int64_t> lengths, const RowPackOptions& options) {
  const int64_t unit = chunk_unit(options.cp);
  check_multiple("row width", options.row, unit, "2·cp");
  for (size_t i = 0; i < lengths.size(); ++i) check_length(lengths[i], i, "sample");
  const auto oversized = longest_above(lengths, options.row);
  if (oversized && options.oversize == OversizeSample::reject)
    throw_usage("sample {}: length {} takes {} slots in a row of {}{}; rows of {} would hold all",
                oversized->item, oversized->length, round_up(oversized->length, unit), options.row,
                oversized->others_text(), round_up(oversized->length, unit));
  RowPacking packing;
  int64_t room = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t sample = i;
    const int64_t slots = round_up(lengths[i], unit);
    if (slots > options.row) {
      packing.dropped.push_back(sample);
      continue;
    }
    if (packing.rows.empty() || slots > room) {
      close_row(packing, room);
      packing.rows.emplace_back();
      room = options.row;
    }
    PackedRow& row = packing.rows.back();
    row.samples.push_back(sample);
    row.seq_lens.push_back(lengths[i]);
    row.seq_lens_padded.push_back(slots);
    room -= slots;
  }
  close_row(packing, room);
  if (packing.rows.empty())
    throw_usage("nothing was packed: none of {} samples fits in a row of {} slots", lengths.size(),
                options.row);
  return packing;
}

LengthTables length_tables(std::span<const PackedRow> rows, int64_t sentinel) {
  int64_t columns = 0;
  for (const PackedRow& row : rows) columns = std::max(columns, std::ssize(row.seq_lens));
  LengthTables tables{{std::ssize(rows), columns, {}}, {std::ssize(rows), columns, {}}};
  const auto append = [&](LengthTable& table, const std::vector<int64_t>& lengths) {
    table.cells.insert(table.cells.end(), lengths.begin(), lengths.end());
    table.cells.insert(table.cells.end(), columns - lengths.size(), sentinel);
  };
  for (const PackedRow& row : rows) {
    append(tables.seq_lens, row.seq_lens);
    append(tables.seq_lens_padded, row.seq_lens_padded);
  }
  return tables;
}

RoundedStream round_sequences(std::span<const int64_t> lengths, const RoundOptions& options) {
  check_round_options(options);
  RoundedStream stream{{0}, {0}, 0};
  for (size_t i = 0; i < lengths.size(); ++i) {
    check_length(lengths[i], i, "sequence");
    extend(stream.cu_seqlens, lengths[i]);
    extend(stream.cu_seqlens_padded, round_up(lengths[i], options.multiple));
  }
  const int64_t needed = stream.cu_seqlens_padded.back();
  int64_t slots = round_up(needed, options.stream_multiple);
  if (options.stream_slots > 0) slots = options.stream_slots;
  if (slots < needed)
    throw_usage("the sequences need {} slots; a stream of {} is too short, the least is {}", needed,
                slots, needed);
  if (slots > needed && (lengths.empty() || options.tail == Tail::own_segment)) {
    stream.cu_seqlens.push_back(stream.cu_seqlens.back());
    extend(stream.cu_seqlens_padded, slots - needed);
  } else if (slots > needed) {
    stream.cu_seqlens_padded.pop_back();
    extend(stream.cu_seqlens_padded, slots - stream.cu_seqlens_padded.back());
  }
  for (size_t i = 0; i + 1 < stream.cu_seqlens_padded.size(); ++i)
    stream.max_slots =
        std::max(stream.max_slots, stream.cu_seqlens_padded[i + 1] - stream.cu_seqlens_padded[i]);
  return stream;
}

}  // namespace gyre
