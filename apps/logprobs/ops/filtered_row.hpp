#pragma once
// A row of logits under a filter, by the definition: what `filtered` and `packed-filtered` compare
// their results with.

#include <cstdint>
#include <vector>

#include "apps/logprobs/context.hpp"
#include "apps/logprobs/result_array.hpp"
#include "logprobs/reference.hpp"

namespace gyre {

class FilteredRow {
 public:
  /// row [vocab_size], without padding.
  FilteredRow(std::vector<double> row, const SamplingFilter& filter);

  /// The log-probability of `id`; no value where rounding decides who survives.
  ExpectedRow score(int32_t id) const;
  /// The gradient of g times that; likewise.
  ExpectedRow gradient(int32_t id, double g) const;
  /// One of both log-probabilities of `id` says that it survives, the other one that an equal logit
  /// does in its place.
  bool is_other_survivor(int32_t id, double got, double want) const;
  /// One of both gradients, of log p of `id` times g, at column `column` is 0, as of one that does
  /// not survive, the other one that of an equal logit that does. `stored`: type of the gradient.
  bool is_other_gradient(int32_t id, double g, DType stored, int64_t column, double got,
                         double want) const;

 private:
  /// Whether a sum of probabilities is so close to top_p that rounding decides who survives.
  bool is_close() const;
  /// The log-probability that column `id` has, or would have if it survived in the place of an
  /// equal logit; NaN when its logit is not that of the smallest survivor.
  double boundary_logprob(int64_t id) const;

  std::vector<double> row_;
  const SamplingFilter& filter_;
  std::vector<double> left_;  // log p of the survivors, -inf for the others
};

/// Bytes of the list of a token's largest logits that a rank sends: top_k of them, or as many as
/// the options say.
int64_t filter_list_bytes(const LogprobsContext& context);

}  // namespace gyre
