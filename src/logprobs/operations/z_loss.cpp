// z-loss: the square of the log-sum-exp of a row, which keeps logits from drifting (PaLM,
// arXiv:2204.02311, section 5; its factor, 1e-4, belongs to the gradient from above):
//
//     value = (log Σ_v e^{z_v})²        dz_v = 2 p_v log Σ_u e^{z_u}

#include "logprobs/operations/list.hpp"

namespace gyre {

RowOperation z_loss_operation() {
  return {.name = "z-loss",
          .summary = "square of the log-sum-exp of each row",
          .definition = "log_softmax_reference",
          .results = {{.name = "z_loss", .check = "losses"}},
          .gradient = "d_z_loss",
          .values =
              [](const OperationRow& row, std::span<double> values) {
                values[0] = row.statistics.log_sum_exp * row.statistics.log_sum_exp;
              },
          .slopes =
              [](const OperationRow& row, std::span<const double> g, RowSlopes& slopes) {
                slopes.log_sum_exp += 2 * g[0] * row.statistics.log_sum_exp;
              },
          .sizes =
              [](const OperationRow& row, std::span<const double> g, RowSlopes& sizes) {
                sizes.log_sum_exp +=
                    2 * std::abs(g[0]) * (1 + std::abs(row.statistics.log_sum_exp));
              },
          .define =
              [](const WholeRow& row, std::span<const double> g) {
                double max = -HUGE_VAL, sum = 0;
                for (const double z : row.logits) max = std::max(max, z / row.temperature);
                for (const double z : row.logits) sum += std::exp(z / row.temperature - max);
                const double log_sum_exp = max + std::log(sum);
                RowAnswer answer{{log_sum_exp * log_sum_exp}, {}};
                for (const double logprob : row.logprobs)
                  answer.d_logits.push_back(2 * g[0] * log_sum_exp * std::exp(logprob) /
                                            row.temperature);
                return answer;
              }};
}

}  // namespace gyre
