// raw-gather: logits of several ids of a token; 0 for an id outside the vocabulary. Backward adds
// each id's gradient to its column.

#include "logprobs/operations/list.hpp"

namespace gyre {

RowOperation raw_gather_operation() {
  return {.name = "raw-gather",
          .summary = "logits of --picks ids a token",
          .definition = "the logits",
          .ids = "ids",
          .on_logits = true,
          .at_temperature_1 = true,
          .results = {{.name = "gathered_logits",
                       .shape = "TK",
                       .check = "logits",
                       .error = RowError::exact,
                       .first_gradient = 2}},
          .gradient = "d_gathered_logits",
          .gradient_reads = {"d_ids"},
          .define = [](const WholeRow& row, std::span<const double> g) {
            RowAnswer answer{{}, std::vector<double>(row.logits.size(), 0)};
            for (size_t k = 0; k < row.ids.size(); ++k) {
              answer.values.push_back(row.is_id(k) ? row.logits[row.ids[k]] : 0);
              if (row.is_id(k)) answer.d_logits[row.ids[k]] += g[k];
            }
            return answer;
          }};
}

}  // namespace gyre
