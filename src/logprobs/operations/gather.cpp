// gather: log-probabilities of several ids of a token; 0 for an id outside the vocabulary.

#include "logprobs/operations/list.hpp"
#include "logprobs/reference.hpp"

namespace gyre {

RowOperation gather_operation() {
  return {.name = "gather",
          .summary = "log-probabilities of --picks ids a token",
          .definition = "log_softmax_reference, score_gradient_reference",
          .ids = "ids",
          .results = {{.name = "gathered",
                       .shape = "TK",
                       .check = "log-probabilities",
                       .error = RowError::logprob,
                       .first_gradient = 2}},
          .gradient = "d_gathered",
          .define = [](const WholeRow& row, std::span<const double> g) {
            RowAnswer answer;
            for (size_t k = 0; k < row.ids.size(); ++k)
              answer.values.push_back(row.is_id(k) ? row.logprobs[row.ids[k]] : 0);
            answer.d_logits = score_gradient_reference(row.logits, row.ids, g, 0, row.temperature);
            return answer;
          }};
}

}  // namespace gyre
