#pragma once
// One forward pass of FilteredScores: finds thresholds in the lists of the largest logits, or by a
// digit search for rows whose lists are too short. Private to filtered_*.cpp.

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "logprobs/filtered_scores.hpp"
#include "logprobs/records/filtered_lists.hpp"
#include "logprobs/rows/row_digits.hpp"
#include "runtime/clock.hpp"

namespace gyre {

/// Threshold of a row, and statistics of the survivors.
struct FilterCut {
  float max = 0;
  float threshold = std::numeric_limits<float>::lowest();  ///< above -inf
  int64_t above = 0;                                       ///< columns above the threshold
  int64_t ties = 0;                                        ///< columns equal to the threshold
  int64_t kept_ties = 0;  ///< surviving ties: those with the highest ids
  double mass = 0;        ///< Σ exp((z - max) · scale) over the survivors
};

/// Adds columns of a group, of mass `weight` each, to the survivors while the mass before them is
/// below `limit`. Returns false if the mass has reached the limit.
bool add_group(const ValueGroup& group, double weight, double limit, FilterCut& cut);

/// A row whose threshold is searched by digits.
struct DigitRow {
  int64_t token;
  float max;
  uint32_t low;           ///< the threshold's key is low .. low + 2^bits - 1
  int bits;               ///< a multiple of digit_bits
  SamplingFilter filter;  ///< with min_p, low is the key of the least value that it keeps
  /// Masses: of all columns (with min_p: of those that it keeps), above the range, inside it.
  int64_t total = 0, above = 0, equal = 0;
};

/// Counts that a rank reports for a row at the end of its search.
struct DigitCounts {
  int32_t above, equal, behind;
};

/// One forward pass.
class FilteredScores::Forward {
 public:
  Forward(FilteredScores& scores, ConstMatrixRef logits, std::span<const int32_t> targets,
          Stream& stream, std::span<float> logprob)
      : s_(scores),
        logits_(logits),
        targets_(targets),
        stream_(stream),
        logprob_(logprob),
        ranks_(scores.tp_.size()),
        mine_(scores.tp_.rank()),
        records_(scores.tokens_, scores.length_, scores.type_, ranks_),
        cut_ties_(scores.tokens_) {
    for (int r = 0; r < ranks_; ++r) columns_.push_back(s_.vocab_.valid(r));
  }

  double run() {
    gather();
    walk();
    s_.rows_by_digits_ = std::ssize(rows_);
    if (!rows_.empty()) search();
    find_cuts();
    return waited_;
  }

 private:
  int64_t own_columns() const { return columns_[mine_]; }
  double scale(int64_t t) const { return s_.scale()[t]; }
  const SamplingFilter& filter(int64_t t) const { return s_.filter(t); }
  int64_t target_column(int64_t t) const { return targets_[t] - s_.vocab_.begin(mine_); }
  int owner(int64_t t) const { return s_.vocab_.owner(targets_[t]); }
  void wait(const WorkPtr& work) {
    const Stopwatch watch;
    work->wait();
    waited_ += watch.seconds();
  }

  void gather();
  void make_records(ListRecords& own);
  void count_behind(ListRecords& own, std::span<const float> values);
  int32_t behind_in_list(int64_t t, std::span<const float> list, const ListScalars& scalars,
                         bool& more) const;
  void walk();
  bool walk_row(int64_t t, std::span<int64_t> scratch);
  double total_mass(int64_t t, float max) const;
  bool cut_by_count(int64_t t, ListWalk& walk, FilterCut& cut) const;
  DigitRow digit_row(int64_t t, float max, double total, float bound) const;
  /// Key of the least value that the filter's min_p keeps in a row with this maximum.
  uint32_t least_likely_key(int64_t t, float max) const;
  void search();
  void add_rounds(std::vector<DigitRow*>& active, bool first);
  Buffer<DigitCounts> gather_counts();
  void finish_by_digits(const DigitRow& row, size_t i, const Buffer<DigitCounts>& counts,
                        std::span<int64_t> ties);
  /// Writes the results of a row. ties_of(rank): number of the rank's columns equal to the
  /// threshold, called only if some do not survive. `behind`: number of columns after the target's,
  /// on its rank, that equal it.
  template <class Ties>
  void finish(int64_t t, const FilterCut& cut, Ties ties_of, int64_t behind);
  void finish_nan(int64_t t);
  int32_t column_of_cut(int64_t t, const FilterCut& cut, int64_t own, int64_t higher);
  void find_cuts();
  int64_t ties_by_lists(int64_t rank, int64_t t, float value) const;

  FilteredScores& s_;
  ConstMatrixRef logits_;
  std::span<const int32_t> targets_;
  Stream& stream_;
  std::span<float> logprob_;
  int ranks_, mine_;
  std::vector<int64_t> columns_;   // [ranks] valid columns
  ListRecords records_;            // of all ranks
  Buffer<int32_t> ids_;            // [tokens, length] columns of the own list, with top-p
  std::vector<DigitRow> rows_;     // rows whose lists are too short
  std::vector<int64_t> cut_ties_;  // [tokens] n: the cut is at the n-th last tie; 0: it is known
  double waited_ = 0;
};

template <class Ties>
void FilteredScores::Forward::finish(int64_t t, const FilterCut& cut, Ties ties_of,
                                     int64_t behind) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  const double log_sum = std::log(cut.mass);
  s_.normalizers_[t] = {cut.max, static_cast<float>(log_sum)};
  s_.kept_[t] = static_cast<int32_t>(cut.above + cut.kept_ties);
  s_.survivors_[t] = {cut.threshold, 0};
  const int rank = owner(t);
  const float target = rank < 0 ? none : records_.scalars(rank, t).target;
  bool survives = target >= cut.threshold;
  if (cut.kept_ties < cut.ties) {
    int64_t higher = 0;  // ties on higher ranks
    for (int64_t r = ranks_ - 1; r >= 0; --r) {
      const int64_t ties = ties_of(r);
      if (r == rank && target == cut.threshold) survives = higher + behind < cut.kept_ties;
      if (r == mine_) s_.survivors_[t].cut = column_of_cut(t, cut, ties, higher);
      higher += ties;
    }
  }
  const double x = (target - static_cast<double>(cut.max)) * scale(t);
  logprob_[t] = survives ? static_cast<float>(x - log_sum) : none;
}

}  // namespace gyre
