#include "attention/row_set.hpp"

#include <algorithm>

namespace gyre {

int64_t RowSet::add(int64_t begin, int64_t end) {
  if (begin >= end) return 0;
  int64_t before = 0, first = begin, last = end;
  auto run = runs_.upper_bound(begin);
  if (run != runs_.begin() && std::prev(run)->second >= begin) --run;
  while (run != runs_.end() && run->first <= end) {
    before += std::max<int64_t>(0, std::min(run->second, end) - std::max(run->first, begin));
    first = std::min(first, run->first);
    last = std::max(last, run->second);
    run = runs_.erase(run);
  }
  runs_[first] = last;
  return before;
}

int64_t RowSet::count() const {
  int64_t rows = 0;
  for (const auto& [begin, end] : runs_) rows += end - begin;
  return rows;
}

RowSet queries_of(std::span<const Rectangle> rectangles) {
  RowSet rows;
  for (const Rectangle& r : rectangles) rows.add(r.q_begin.value(), r.q_begin.value() + r.q_length);
  return rows;
}

RowSet keys_of(std::span<const Rectangle> rectangles) {
  RowSet rows;
  for (const Rectangle& r : rectangles) rows.add(r.k_begin.value(), r.k_begin.value() + r.k_length);
  return rows;
}

}  // namespace gyre
