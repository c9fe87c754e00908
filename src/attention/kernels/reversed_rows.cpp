#include "attention/kernels/reversed_rows.hpp"

#include <algorithm>
#include <utility>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Rows [begin, end) of an array in scratch rows that end at `scratch_end`, the last one first.
struct Run {
  int64_t begin, end, scratch_end;
};

/// Maps the rows of some intervals to scratch rows.
class Reversal {
 public:
  void touch(int64_t begin, int64_t end) { intervals_.emplace_back(begin, end); }

  /// Assigns the scratch rows of all rows touched so far.
  void assign() {
    std::ranges::sort(intervals_);
    for (const auto& [begin, end] : intervals_) {
      if (runs_.empty() || runs_.back().end < begin)
        runs_.push_back({begin, end, 0});
      else
        runs_.back().end = std::max(runs_.back().end, end);
    }
    for (Run& run : runs_) rows_ += run.end - run.begin;
    int64_t scratch_end = rows_;
    for (Run& run : runs_)
      run.scratch_end = std::exchange(scratch_end, scratch_end - (run.end - run.begin));
  }

  int64_t rows() const { return rows_; }

  /// First scratch row of the rows [..., end) of an interval.
  int64_t scratch_of(int64_t end) const {
    const auto run = std::ranges::lower_bound(runs_, end, {},
                                              [](const Run& candidate) { return candidate.end; });
    return run->scratch_end - (end - run->begin);
  }

  Round round() const {
    Round round;
    for (const Run& run : runs_)
      for (int64_t row = run.begin; row < run.end; row += longest_piece)
        round.push_back({row, run.scratch_end - 1 - (row - run.begin),
                         std::min(longest_piece, run.end - row), -1});
    return round;
  }

 private:
  std::vector<std::pair<int64_t, int64_t>> intervals_;
  std::vector<Run> runs_;
  int64_t rows_ = 0;
};

}  // namespace

bool is_inverse(const Rectangle& r) {
  return r.mask.window > 0 && r.mask.q_stride == r.mask.k_stride && r.mask.end_key(0) >= r.k_length;
}

ReversedRows reversed_rows(std::span<const Rectangle> inverse) {
  Reversal queries, keys;
  for (const Rectangle& r : inverse) {
    GYRE_CHECK(is_inverse(r), "queries from {}, keys from {}", r.q_begin, r.k_begin);
    queries.touch(r.q_begin, r.q_end());
    keys.touch(r.k_begin, r.k_end());
  }
  queries.assign();
  keys.assign();
  ReversedRows result;
  for (const Rectangle& r : inverse) {
    Mask mask;
    mask.causal = true;
    mask.offset = r.k_length - 1 - r.mask.begin_key(r.q_length - 1);
    result.rectangles.push_back(
        {queries.scratch_of(r.q_end()), r.q_length, keys.scratch_of(r.k_end()), r.k_length, mask});
  }
  std::ranges::stable_sort(result.rectangles, {}, &Rectangle::q_begin);
  result.queries = queries.round();
  result.keys = keys.round();
  result.q_rows = queries.rows();
  result.k_rows = keys.rows();
  return result;
}

Round exchanged(const Round& round) {
  Round result;
  for (const RowPiece& p : round) {
    const int64_t last = p.length - 1;
    result.push_back(p.step > 0 ? RowPiece{p.scratch, p.row, p.length, p.step}
                                : RowPiece{p.scratch - last, p.row + last, p.length, p.step});
  }
  return result;
}

}  // namespace gyre
