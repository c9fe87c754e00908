// logprob-entropy: log-probability of each token's target and entropy, in one pass.

#include "logprobs/operations/list.hpp"
#include "logprobs/reference.hpp"

namespace gyre {

RowOperation logprob_entropy_operation() {
  return {.name = "logprob-entropy",
          .summary = "log-probability of each token's target and entropy, in one pass",
          .definition = "score_row_reference, score_gradient_reference",
          .ids = "targets",
          .entropy = true,
          .results = {{.name = "logprob", .check = "log-probabilities", .error = RowError::logprob},
                      {.name = "entropy",
                       .check = "entropies",
                       .error = RowError::entropy,
                       .first_gradient = 1}},
          .gradient = "d_logprob_entropy",
          .gradient_is_sum_of = {"d_logprob", "d_entropy"},
          .headline = true,
          .define = [](const WholeRow& row, std::span<const double> g) {
            const TokenScore score = score_row_reference(row.logits, row.ids[0], row.temperature);
            return RowAnswer{
                {score.logprob, score.entropy},
                score_gradient_reference(row.logits, row.ids, g.first(1), g[1], row.temperature)};
          }};
}

}  // namespace gyre
