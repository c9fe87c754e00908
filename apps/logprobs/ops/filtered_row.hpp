#pragma once
// Reference for a row of logits under a filter, used to check `filtered` and `packed-filtered`.
// Where rounding decides how many ids survive, a result is compared with the reference that has the
// same number of survivors. So is an answer of the file, whose number may differ.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/logprobs/inputs.hpp"
#include "harness/result_array.hpp"
#include "logprobs/filtered_scores.hpp"
#include "logprobs/reference.hpp"
#include "report/verify.hpp"

namespace gyre {

/// The file's answers for one token under a filter. A missing answer is empty.
struct FilteredAnswers {
  std::optional<double> logprob;
  std::span<const double> gradient;  ///< [vocab_size], or empty
};

class FilteredRow {
 public:
  /// `row` [vocab_size] has no padding. `id` is scored; g is the gradient of its log-probability.
  FilteredRow(std::vector<double> row, const SamplingFilter& filter, int32_t id, double g);
  FilteredRow(const FilteredRow&) = delete;
  FilteredRow& operator=(const FilteredRow&) = delete;

  /// The expected log-probability for the valid survivor set nearest to `got`, and for the answers.
  ExpectedRow score(double got, const FilteredAnswers& answers) const;
  /// The expected gradient for `survivors` survivors, and for the survivor set of the answers.
  ExpectedRow gradient(int64_t survivors, const FilteredAnswers& answers) const;
  /// Checks that the number of survivors is valid and that `got` is the log-probability among them.
  /// `any_of_ties` lets any one of equal logits survive. `place` names the row.
  void compare_survivors(int64_t survivors, double got, bool any_of_ties, const std::string& place,
                         Check& check) const;
  /// Whether the id survives according to only one of `got` and `want`, and an equal logit may
  /// survive in its place.
  bool is_other_survivor(double got, double want) const;
  /// Exactly one of the gradients `got` and `want` must be 0: it is of a dropped `column`. Whether
  /// the other is right for an equal logit that survives. `stored` is the type of the gradient.
  bool is_other_gradient(DType stored, int64_t column, double got, double want) const;

 private:
  ExpectedRow score_of(int64_t survivors) const;
  ExpectedRow gradient_of(int64_t survivors) const;
  /// The number of survivors that the answers imply; empty without answers.
  std::optional<int64_t> survivors_of(const FilteredAnswers& answers) const;
  /// Whether the filter may drop the column and keep an equal logit.
  bool is_at_boundary(int64_t column) const;
  /// The log-probability that a column has, or would have if it replaced an equal logit.
  double logprob_in_place(int64_t column, int64_t survivors) const;
  int32_t at_rank(int64_t rank) const { return survivors_.ranked()[rank]; }
  double logit(int64_t column) const { return row_[column]; }
  double slope() const { return g_ / filter_.temperature; }

  std::vector<double> row_;
  SamplingFilter filter_;
  int32_t id_;
  double g_;
  SurvivorsReference survivors_;
};

/// Compares survivor counts `kept` and log-probabilities of the sampled `rows` with row_of(row),
/// by FilteredRow::compare_survivors. `tokens` has the token of every row.
template <class RowOf>
void compare_survivors(std::span<const size_t> rows, std::span<const int64_t> tokens,
                       std::span<const int32_t> kept, std::span<const float> logprob,
                       bool any_of_ties, const RowOf& row_of, Check& check) {
  for (const size_t r : rows)
    row_of(r).compare_survivors(kept[r], logprob[r], any_of_ties,
                                "token " + std::to_string(tokens[r]), check);
  const auto padding = std::ranges::count_if(tokens, [](int64_t token) { return token < 0; });
  check.add_sample(std::ssize(rows), std::ssize(tokens) - padding);
}

/// Filters of rows of tokens.
class RowFilters {
 public:
  RowFilters(const LogprobsContext& context, std::span<const int64_t> tokens)
      : context_(context), of_rows_(context.filters(tokens)) {}
  /// Options that FilteredScores takes; valid while this object is.
  FilterOptions options(RowKernels* kernels = nullptr) const {
    return {context_.problem.filter, context_.options.list_length, context_.options.threads,
            kernels, of_rows_};
  }
  /// Bytes that a rank sends for a token's list of largest logits.
  int64_t list_bytes() const {
    return filter_list_length(options(), context_.problem.vocab) *
           static_cast<int64_t>(size_of(context_.problem.type));
  }

 private:
  const LogprobsContext& context_;
  std::vector<SamplingFilter> of_rows_;
};

}  // namespace gyre
