#include "attention/row_set.hpp"

#include <algorithm>

namespace gyre {

int64_t RowSet::add(int64_t begin, int64_t end) {
  if (begin >= end) return 0;
  const auto first = std::partition_point(runs_.begin(), runs_.end(),
                                          [&](const Run& run) { return run.end < begin; });
  if (first == runs_.end() || first->begin > end) {
    runs_.insert(first, {begin, end});
    return 0;
  }
  // Joins [begin, end) and all runs that it overlaps or touches.
  int64_t before = 0;
  Run joined{begin, end};
  auto last = first;
  for (; last != runs_.end() && last->begin <= end; ++last) {
    before += std::min(last->end, end) - std::max(last->begin, begin);
    joined = {std::min(joined.begin, last->begin), std::max(joined.end, last->end)};
  }
  *first = joined;
  runs_.erase(first + 1, last);
  return before;
}

int64_t RowSet::count() const {
  int64_t rows = 0;
  for (const Run& run : runs_) rows += run.end - run.begin;
  return rows;
}

RowSet queries_of(std::span<const Rectangle> rectangles) {
  RowSet rows;
  for (const Rectangle& r : rectangles) rows.add(r.q_begin, r.q_begin + r.q_length);
  return rows;
}

RowSet keys_of(std::span<const Rectangle> rectangles) {
  RowSet rows;
  for (const Rectangle& r : rectangles) rows.add(r.k_begin, r.k_begin + r.k_length);
  return rows;
}

}  // namespace gyre
