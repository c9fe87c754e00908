// logprob: log-probability of each token's target.

#include "logprobs/operations/list.hpp"
#include "logprobs/reference.hpp"

namespace gyre {

RowOperation logprob_operation() {
  return {
      .name = "logprob",
      .summary = "log-probability of each token's target",
      .definition = "score_row_reference, score_gradient_reference",
      .ids = "targets",
      .results = {{.name = "logprob", .check = "log-probabilities", .error = RowError::logprob}},
      .gradient = "d_logprob",
      .define = [](const WholeRow& row, std::span<const double> g) {
        return RowAnswer{{score_row_reference(row.logits, row.ids[0], row.temperature).logprob},
                         score_gradient_reference(row.logits, row.ids, g, 0, row.temperature)};
      }};
}

}  // namespace gyre
