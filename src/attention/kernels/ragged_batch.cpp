#include "attention/kernels/ragged_batch.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "attention/kernels/joined.hpp"
#include "attention/kernels/reversed_rows.hpp"
#include "attention/kernels/staircase.hpp"
#include "core/error.hpp"

namespace gyre {
namespace {

struct Part {
  RaggedMask mask;
  RaggedEntry entry;
  int64_t window = 0;
};

/// Parts of a rectangle: entries, and a remainder that cannot be an entry.
struct Parts {
  std::vector<Part> entries;
  std::optional<Rectangle> rest;
};

/// Part with `queries` queries from `first` and the first `keys` keys of a rectangle.
Part part_of(const Rectangle& r, RaggedMask mask, int64_t first, int64_t queries, int64_t keys) {
  return {mask, {r.q_begin + first, queries, r.k_begin, keys, 0, 0}};
}

/// The queries of a rectangle from `first` on.
Rectangle queries_from(const Rectangle& r, int64_t first) {
  Rectangle rest = r;
  rest.q_begin += first;
  rest.q_length -= first;
  rest.mask.offset += first * r.mask.q_stride;
  return rest;
}

/// Parts of a rectangle with a diagonal. Precondition: equal strides.
Parts diagonal_parts(const Rectangle& r) {
  const int64_t stride = r.mask.q_stride;
  const int64_t offset = floor_div(r.mask.offset, stride);
  // Largest number of keys that a query sees; the same for all queries.
  const int64_t window =
      r.mask.window == 0 ? 0 : offset - floor_div(r.mask.offset - r.mask.window, stride);
  const int64_t first = std::max<int64_t>(0, -offset);
  const int64_t keys = std::min(r.k_length, offset + r.q_length);
  if (first >= r.q_length || keys <= 0 || (r.mask.window > 0 && window == 0)) return {};
  // The last query on the diagonal is the first that sees all keys.
  const int64_t on_diagonal = std::min(r.q_length, keys - offset) - first;
  // Keys before the first query's window are seen by no query.
  const int64_t skipped = window == 0 ? 0 : std::max<int64_t>(0, offset + first - window + 1);
  if (on_diagonal <= 0 || skipped >= keys) return {{}, queries_from(r, first)};
  const bool square = on_diagonal == keys - skipped;
  Parts parts;
  parts.entries = {part_of(r, square ? RaggedMask::causal : RaggedMask::causal_end, first,
                           on_diagonal, keys - skipped)};
  RaggedEntry& entry = parts.entries.front().entry;
  entry.k_begin += skipped;
  // A window that includes the first key for the last query hides nothing.
  if (window < entry.k_length) parts.entries.front().window = window;
  const int64_t rest = first + on_diagonal;
  if (rest == r.q_length) return parts;
  if (window > 0)
    parts.rest = queries_from(r, rest);
  else
    parts.entries.push_back(part_of(r, RaggedMask::full, rest, r.q_length - rest, keys));
  return parts;
}

/// Parts of a rectangle. `reason`: why the remainder, if there is one, cannot be an entry.
Parts parts_of(const Rectangle& r, NotRagged& reason) {
  if (r.q_length <= 0 || r.k_length <= 0) return {};
  if (is_full(r)) return {{part_of(r, RaggedMask::full, 0, r.q_length, r.k_length)}, {}};
  if (r.q_length == 1) {  // for any strides
    const int64_t begin = std::max<int64_t>(0, r.mask.begin_key(0));
    const int64_t keys = std::min(r.k_length, r.mask.end_key(0)) - begin;
    if (keys <= 0) return {};
    Part part = part_of(r, RaggedMask::full, 0, 1, keys);
    part.entry.k_begin += begin;
    return {{part}, {}};
  }
  reason = r.mask.window > 0 ? NotRagged::window : NotRagged::strides;
  if (!r.mask.causal || r.mask.q_stride != r.mask.k_stride) return {{}, r};
  Rectangle seen = r;
  if (r.mask.begin_key(r.q_length - 1) <= 0) seen.mask.window = 0;  // hides no key
  return diagonal_parts(seen);
}

void append(RaggedBatch& batch, const RaggedEntry& entry) {
  batch.q_rows += entry.q_length;
  batch.k_rows += entry.k_length;
  batch.longest_q = std::max(batch.longest_q, entry.q_length);
  batch.longest_k = std::max(batch.longest_k, entry.k_length);
  batch.q_end = std::max(batch.q_end, entry.q_begin + entry.q_length);
  batch.entries.push_back(entry);
}

/// Sorts the entries and assigns scratch rows.
void complete(RaggedBatch& batch) {
  std::stable_sort(
      batch.entries.begin(), batch.entries.end(),
      [](const RaggedEntry& a, const RaggedEntry& b) { return a.q_begin < b.q_begin; });
  int64_t q_row = 0, k_row = 0;
  for (RaggedEntry& e : batch.entries) {
    e.q_row = std::exchange(q_row, q_row + e.q_length);
    e.k_row = std::exchange(k_row, k_row + e.k_length);
  }
}

int64_t row_of(const RaggedEntry& e, RaggedRows rows) {
  switch (rows) {
    case RaggedRows::q:
      return e.q_begin;
    case RaggedRows::k:
      return e.k_begin;
    case RaggedRows::scratch_q:
      return e.q_row;
    case RaggedRows::scratch_k:
      break;
  }
  return e.k_row;
}

int64_t length_of(const RaggedEntry& e, RaggedRows rows) {
  return rows == RaggedRows::q || rows == RaggedRows::scratch_q ? e.q_length : e.k_length;
}

using RowInterval = std::pair<int64_t, int64_t>;  // rows [first, second)

/// Rows of a result that a batch writes.
std::vector<RowInterval> rows_of(const RaggedBatch& batch, RaggedRows side) {
  std::vector<RowInterval> rows;
  for (const RaggedEntry& e : batch.entries)
    rows.emplace_back(row_of(e, side), row_of(e, side) + length_of(e, side));
  return rows;
}

/// Sorts intervals and joins those that touch or overlap; returns whether any overlapped.
bool unite(std::vector<RowInterval>& intervals) {
  std::sort(intervals.begin(), intervals.end());
  bool overlap = false;
  std::vector<RowInterval> united;
  for (const RowInterval& next : intervals) {
    if (united.empty() || united.back().second < next.first) {
      united.push_back(next);
      continue;
    }
    overlap = overlap || next.first < united.back().second;
    united.back().second = std::max(united.back().second, next.second);
  }
  intervals = std::move(united);
  return overlap;
}

std::vector<Round> rounds_of(const RaggedBatch& batch, RaggedRows result, RaggedRows scratch) {
  std::vector<Round> rounds;
  const auto meets = [](const RowPiece& a, const RowPiece& b) {
    return a.row < b.row + b.length && b.row < a.row + a.length;
  };
  for (const RaggedEntry& e : batch.entries) {
    const RowPiece piece = {row_of(e, result), row_of(e, scratch), length_of(e, result)};
    // The piece joins the round after the last one with its rows, to keep the order of entries.
    const auto meets_round = [&](const Round& round) {
      return std::ranges::any_of(round, [&](const RowPiece& p) { return meets(p, piece); });
    };
    size_t round = rounds.size();
    while (round > 0 && !meets_round(rounds[round - 1])) --round;
    if (round == rounds.size()) rounds.emplace_back();
    rounds[round].push_back(piece);
  }
  return rounds;
}

}  // namespace

const char* name_of(NotRagged reason) {
  switch (reason) {
    case NotRagged::fixed_tiles:
      return "bits that do not depend on the batch";
    case NotRagged::window:
      return "window";
    case NotRagged::strides:
      return "unequal strides";
  }
  return "?";
}

RaggedPlan plan_ragged(std::span<const Rectangle> rectangles, bool fixed_tiles, int64_t max_entries,
                       int64_t max_rows, int64_t least_inverse_keys) {
  RaggedPlan plan;
  std::map<std::tuple<RaggedMask, int64_t, int>, RaggedBatch> open;
  const auto close = [&](RaggedBatch& batch) {
    if (batch.entries.empty()) return;
    complete(batch);
    plan.batches.push_back(std::exchange(batch, {}));
  };
  const auto add = [&](const Rectangle& r) {
    NotRagged reason = NotRagged::fixed_tiles;
    const Parts parts = fixed_tiles ? Parts{{}, r} : parts_of(r, reason);
    if (const std::optional<Rectangle>& rest = parts.rest) {
      const bool reverse = reason == NotRagged::window && is_inverse(*rest) &&
                           rest->pairs() >= least_inverse_keys * rest->q_length;
      (reverse ? plan.inverse : plan.others).push_back(*rest);
      if (!reverse) ++plan.reasons[static_cast<size_t>(reason)];
    }
    for (const Part& part : parts.entries) {
      RaggedBatch& batch = open[{part.mask, part.window, length_class(part.entry.q_length)}];
      const int64_t entries = std::ssize(batch.entries) + 1;
      if (entries > max_entries ||
          entries * std::max(batch.longest_q, part.entry.q_length) > max_rows ||
          entries * std::max(batch.longest_k, part.entry.k_length) > max_rows)
        close(batch);
      batch.mask = part.mask;
      batch.window = part.window;
      append(batch, part.entry);
    }
  };
  if (fixed_tiles) {
    for (const Rectangle& r : rectangles) add(r);
    return plan;
  }
  for (const std::vector<Rectangle>& layer : staircase_layers(joined(rectangles))) {
    for (const Rectangle& r : layer) add(r);
    for (auto& [key, batch] : open) close(batch);
  }
  return plan;
}

RaggedPlan plan_of_call(std::span<const Rectangle> rectangles, bool fixed_tiles, int64_t rows) {
  return plan_ragged(rectangles, fixed_tiles, 1024, std::max<int64_t>(16384, 2 * rows), 256);
}

int length_class(int64_t q_length) {
  int result = 0;
  for (int64_t longest = 512; q_length > longest; longest *= 4) ++result;
  return result;
}

std::vector<Rectangle> rectangles_of(const RaggedBatch& batch) {
  std::vector<Rectangle> rectangles;
  rectangles.reserve(batch.entries.size());
  for (const RaggedEntry& e : batch.entries) {
    Mask mask;
    mask.causal = batch.mask != RaggedMask::full;
    mask.offset = mask.causal ? e.k_length - e.q_length : 0;
    mask.window = batch.window;
    rectangles.push_back({e.q_begin, e.q_length, e.k_begin, e.k_length, mask});
  }
  return rectangles;
}

std::vector<Round> query_rounds(const RaggedBatch& batch) {
  return rounds_of(batch, RaggedRows::q, RaggedRows::scratch_q);
}

std::vector<Round> key_rounds(const RaggedBatch& batch) {
  return rounds_of(batch, RaggedRows::k, RaggedRows::scratch_k);
}

std::vector<bool> overwriting_batches(std::span<const RaggedBatch> batches, RaggedRows side) {
  std::vector<bool> overwriting;
  std::vector<RowInterval> touched;  // by all batches so far
  for (const RaggedBatch& batch : batches) {
    const std::vector<RowInterval> rows = rows_of(batch, side);
    touched.insert(touched.end(), rows.begin(), rows.end());
    overwriting.push_back(!unite(touched));
  }
  return overwriting;
}

FirstWriters first_writers(std::span<const RaggedBatch> batches, RaggedRows side, int64_t rows) {
  FirstWriters result;
  result.first = overwriting_batches(batches, side);
  std::vector<RowInterval> touched, written;  // by all batches; by first writers
  for (size_t i = 0; i < batches.size(); ++i) {
    const std::vector<RowInterval> mine = rows_of(batches[i], side);
    touched.insert(touched.end(), mine.begin(), mine.end());
    if (result.first[i]) written.insert(written.end(), mine.begin(), mine.end());
  }
  unite(touched);
  const auto add_pieces = [](Round& round, int64_t begin, int64_t end) {
    for (; begin < end; begin += longest_piece)
      round.push_back({begin, begin, std::min(end - begin, longest_piece)});
  };
  const auto add_gaps = [&](Round& round, const std::vector<RowInterval>& between) {
    int64_t row = 0;
    for (const auto& [begin, end] : between) {
      add_pieces(round, row, begin);
      row = end;
    }
    add_pieces(round, row, rows);
  };
  for (const auto& [begin, end] : touched) add_pieces(result.touched, begin, end);
  add_gaps(result.outside, touched);
  unite(written);
  add_gaps(result.rest, written);
  return result;
}

int64_t first_row(const RaggedBatch& batch, RaggedRows rows) {
  if (rows == RaggedRows::scratch_q || rows == RaggedRows::scratch_k || batch.entries.empty())
    return 0;
  int64_t first = row_of(batch.entries.front(), rows);
  for (const RaggedEntry& e : batch.entries) first = std::min(first, row_of(e, rows));
  return first / 4 * 4;
}

RaggedBatch filled_up(const RaggedBatch& batch) {
  constexpr int64_t exact = 8;
  RaggedBatch result = batch;
  const int64_t entries = std::ssize(batch.entries);
  const int64_t wanted = entries <= exact ? entries : rounded_up(entries, exact);
  for (int64_t i = entries; i < wanted; ++i) {
    const RaggedEntry& first = batch.entries.front();
    result.entries.push_back(
        {first.q_begin, 1, first.k_begin, 1, result.q_rows++, result.k_rows++});
  }
  return result;
}

RaggedLimits limits_of(const RaggedBatch& batch) {
  const auto longest = [&](RaggedRows rows, int64_t of_entry) {
    int64_t end = 0;
    for (const RaggedEntry& e : batch.entries)
      end = std::max(end, row_of(e, rows) + length_of(e, rows));
    const int64_t of_all = ceil_div(end - first_row(batch, rows), std::ssize(batch.entries));
    return rounded_up(std::max(of_entry, of_all), 128);
  };
  return {longest(RaggedRows::q, batch.longest_q), longest(RaggedRows::k, batch.longest_k)};
}

std::vector<int32_t> ragged_lengths(const RaggedBatch& batch, RaggedRows rows) {
  std::vector<int32_t> lengths;
  for (const RaggedEntry& e : batch.entries) {
    const int64_t length = length_of(e, rows);
    lengths.push_back(static_cast<int32_t>(length));
    GYRE_CHECK(lengths.back() == length, "a sequence of {} rows", length);
  }
  return lengths;
}

std::vector<int64_t> ragged_offsets(const RaggedBatch& batch, RaggedRows rows, int64_t stride) {
  const int64_t first = first_row(batch, rows);
  int64_t end = 0;
  std::vector<int64_t> offsets;
  for (const RaggedEntry& e : batch.entries) {
    const int64_t row = row_of(e, rows) - first;
    offsets.push_back(row * stride);
    end = std::max(end, (row + length_of(e, rows)) * stride);
  }
  offsets.push_back(end);
  return offsets;
}

std::optional<EvenBatch> even_batch(const RaggedBatch& batch) {
  const std::vector<RaggedEntry>& entries = batch.entries;
  if (entries.empty()) return {};
  const RaggedEntry& first = entries.front();
  EvenBatch even{first.q_length, first.k_length};
  if (entries.size() > 1)
    even = {entries[1].q_begin - first.q_begin, entries[1].k_begin - first.k_begin};
  if (even.q_distance < first.q_length || even.k_distance < first.k_length) return {};
  for (size_t i = 1; i < entries.size(); ++i) {
    const int64_t n = i;
    if (entries[i].q_length != first.q_length || entries[i].k_length != first.k_length ||
        entries[i].q_begin != first.q_begin + n * even.q_distance ||
        entries[i].k_begin != first.k_begin + n * even.k_distance)
      return {};
  }
  return even;
}

int64_t rounded_up(int64_t n, int64_t least) {
  int64_t size = least;
  while (size < n) size *= 2;
  return size;
}

}  // namespace gyre
