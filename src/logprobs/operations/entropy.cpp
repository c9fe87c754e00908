// entropy: entropy of each token's distribution.

#include "logprobs/operations/list.hpp"
#include "logprobs/reference.hpp"

namespace gyre {

RowOperation entropy_operation() {
  return {.name = "entropy",
          .summary = "entropy of each token's distribution",
          .definition = "score_row_reference, score_gradient_reference",
          .entropy = true,
          .results = {{.name = "entropy",
                       .check = "entropies",
                       .error = RowError::entropy,
                       .first_gradient = 1}},
          .gradient = "d_entropy",
          .define = [](const WholeRow& row, std::span<const double> g) {
            return RowAnswer{{score_row_reference(row.logits, -1, row.temperature).entropy},
                             score_gradient_reference(row.logits, {}, {}, g[0], row.temperature)};
          }};
}

}  // namespace gyre
