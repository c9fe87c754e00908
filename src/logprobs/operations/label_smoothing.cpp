// label-smoothing: cross entropy with a target of which a share ε is spread evenly over the
// vocabulary, the target's own id included (as torch.nn.CrossEntropyLoss does):
//
//     value = -(1 - ε) log p_t - ε (1/V) Σ_v log p_v        dz_v = p_v - (1 - ε) {v = t} - ε / V
//
// The mean is over the whole vocabulary, not over the columns of a rank. A token without a target
// has the value 0 and no gradient.

#include "logprobs/operations/list.hpp"

namespace gyre {

RowOperation label_smoothing_operation() {
  return {.name = "label-smoothing",
          .summary = "cross entropy with a target smoothed over the vocabulary",
          .definition = "log_softmax_reference",
          .ids = "targets",
          .mean_logprob = true,
          .parameters = {{.name = "label_smoothing",
                          .help = "Share of a target that is spread over the vocabulary",
                          .usual = 0.1,
                          .least = 0,
                          .most = 1}},
          .results = {{.name = "smoothed_cross_entropy", .check = "losses"}},
          .gradient = "d_smoothed_cross_entropy",
          .values =
              [](const OperationRow& row, std::span<double> values) {
                const double share = row.parameters[0];
                values[0] = 0;
                if (share > 0) values[0] -= share * row.statistics.mean_logprob;
                if (share < 1) values[0] -= (1 - share) * row.statistics.of_ids[0];
                if (!row.is_id(0)) values[0] = 0;
              },
          .slopes =
              [](const OperationRow& row, std::span<const double> g, RowSlopes& slopes) {
                if (!row.is_id(0)) return;
                slopes.of_ids[0] -= g[0] * (1 - row.parameters[0]);
                slopes.mean_logprob -= g[0] * row.parameters[0];
              },
          .define =
              [](const WholeRow& row, std::span<const double> g) {
                const size_t ids = row.logits.size();
                RowAnswer answer{{0}, std::vector<double>(ids, 0)};
                if (!row.is_id(0)) return answer;
                std::vector<double> target(ids, row.parameters[0] / static_cast<double>(ids));
                target[row.ids[0]] += 1 - row.parameters[0];
                for (size_t v = 0; v < ids; ++v) {
                  if (target[v] != 0) answer.values[0] -= target[v] * row.logprobs[v];
                  answer.d_logits[v] =
                      g[0] * (std::exp(row.logprobs[v]) - target[v]) / row.temperature;
                }
                return answer;
              }};
}

}  // namespace gyre
