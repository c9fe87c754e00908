#pragma once
// A row of logits under a filter, by the definition: what `filtered` and `packed-filtered` compare
// their results with. Where rounding decides how many survive, a result is held against the row
// with as many survivors as it has, and so is an answer of the file, which may have another number.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/logprobs/context.hpp"
#include "harness/result_array.hpp"
#include "logprobs/reference.hpp"
#include "report/verify.hpp"

namespace gyre {

/// The file's answers for one token under a filter; a missing answer is absent or empty.
struct FilteredAnswers {
  std::optional<double> logprob;
  std::span<const double> gradient;  ///< [vocab_size], or empty
};

class FilteredRow {
 public:
  /// row [vocab_size], without padding. `id` is asked for; g: the gradient of its log-probability.
  FilteredRow(std::vector<double> row, const SamplingFilter& filter, int32_t id, double g);
  FilteredRow(const FilteredRow&) = delete;
  FilteredRow& operator=(const FilteredRow&) = delete;

  /// The expected log-probability: of the right set nearest to `got`, and of that of the answers.
  ExpectedRow score(double got, const FilteredAnswers& answers) const;
  /// The expected gradient: of `survivors` survivors, and of the right set of the answers.
  ExpectedRow gradient(int64_t survivors, const FilteredAnswers& answers) const;
  /// Adds that as many survive as may, and that `got` is the log-probability among so many.
  /// `any_of_ties`: another one of equal logits may survive. `place` names the row.
  void compare_survivors(int64_t survivors, double got, bool any_of_ties, const std::string& place,
                         Check& check) const;
  /// One of both log-probabilities says that the id survives, the other one that an equal logit
  /// does in its place.
  bool is_other_survivor(double got, double want) const;
  /// One of both gradients at column `column` is 0, as of one that does not survive; whether the
  /// other one is that of an equal logit that does. `stored`: type of the gradient.
  bool is_other_gradient(DType stored, int64_t column, double got, double want) const;

 private:
  ExpectedRow score_of(int64_t survivors) const;
  ExpectedRow gradient_of(int64_t survivors) const;
  /// How many survive, as the answers say; nothing without answers.
  std::optional<int64_t> survivors_of(const FilteredAnswers& answers) const;
  /// Whether the filter may drop the column and keep an equal logit.
  bool is_at_boundary(int64_t column) const;
  /// The log-probability that a column has, or would have in the place of an equal logit.
  double logprob_in_place(int64_t column, int64_t survivors) const;
  int32_t at_rank(int64_t rank) const { return survivors_.ranked()[static_cast<size_t>(rank)]; }
  double logit(int64_t column) const { return row_[static_cast<size_t>(column)]; }
  double slope() const { return g_ / filter_.temperature; }

  std::vector<double> row_;
  const SamplingFilter& filter_;
  int32_t id_;
  double g_;
  SurvivorsReference survivors_;
};

/// Holds the numbers of survivors `kept` and the log-probabilities of `rows`, which are of
/// `tokens`, against row_of(row): FilteredRow::compare_survivors.
template <class RowOf>
void compare_survivors(std::span<const size_t> rows, std::span<const int64_t> tokens,
                       std::span<const int32_t> kept, std::span<const float> logprob,
                       bool any_of_ties, const RowOf& row_of, Check& check) {
  for (const size_t r : rows)
    row_of(r).compare_survivors(kept[r], static_cast<double>(logprob[r]), any_of_ties,
                                "token " + std::to_string(tokens[r]), check);
  const auto padding = std::ranges::count_if(tokens, [](int64_t token) { return token < 0; });
  check.add_sample(std::ssize(rows), std::ssize(tokens) - padding);
}

/// Bytes of the list of a token's largest logits that a rank sends: top_k of them, or as many as
/// the options say.
int64_t filter_list_bytes(const LogprobsContext& context);

}  // namespace gyre
