// focal: cross entropy of the target, less where the target is likely already (Lin et al.,
// arXiv:1708.02002):
//
//     value = -(1 - p_t)^γ log p_t
//     d value / d log p_t = (1 - p_t)^(γ-1) (γ p_t log p_t + p_t - 1)
//
// γ = 0 is the cross entropy. A token without a target has the value 0 and no gradient.

#include <utility>

#include "logprobs/operations/list.hpp"

namespace gyre {
namespace {

/// d value / d log p_t. 1 - p_t is computed without cancellation.
double slope_of(double logprob, double gamma) {
  const double other = -std::expm1(logprob);
  if (other <= 0) return 0;
  const double p = std::exp(logprob), weighted = p == 0 ? 0 : gamma * p * logprob;
  return std::pow(other, gamma - 1) * (weighted - other);
}

}  // namespace

RowOperation focal_operation() {
  return {.name = "focal",
          .summary = "cross entropy of each token's target, weighted by (1 - p)^gamma",
          .definition = "log_softmax_reference",
          .ids = "targets",
          .parameters = {{.name = "focal_gamma",
                          .help = "Exponent of 1 - p in the weight of a focal loss",
                          .usual = 2,
                          .least = 0,
                          .most = 16}},
          .results = {{.name = "focal_loss", .check = "losses"}},
          .gradient = "d_focal_loss",
          .values =
              [](const OperationRow& row, std::span<double> values) {
                const double logprob = row.statistics.of_ids[0];
                const double weight = std::pow(-std::expm1(logprob), row.parameters[0]);
                values[0] = weight != 0 ? -weight * logprob : 0;
                if (std::isnan(logprob)) values[0] = logprob;
              },
          .slopes =
              [](const OperationRow& row, std::span<const double> g, RowSlopes& slopes) {
                if (row.is_id(0))
                  slopes.of_ids[0] += g[0] * slope_of(row.statistics.of_ids[0], row.parameters[0]);
              },
          .sizes =
              [](const OperationRow& row, std::span<const double> g, RowSlopes& sizes) {
                if (!row.is_id(0)) return;
                // A relative error of 1 - p is at most that of log p.
                const double gamma = row.parameters[0], logprob = row.statistics.of_ids[0];
                sizes.of_ids[0] +=
                    std::abs(g[0]) * (1 + gamma) * (1 + gamma) * (1 + std::min(100.0, -logprob));
              },
          .define =
              [](const WholeRow& row, std::span<const double> g) {
                const double gamma = row.parameters[0];
                RowAnswer answer{{0}, std::vector<double>(row.logits.size(), 0)};
                if (!row.is_id(0)) return answer;
                const double logprob = row.logprobs[row.ids[0]], p = std::exp(logprob);
                const double weight = gamma == 0 ? 1 : std::pow(1 - p, gamma);
                answer.values[0] = weight == 0 ? 0 : -weight * logprob;
                // The derivative by p, times that of p by the logits.
                double by_logprob = -weight;
                if (gamma != 0 && p > 0 && p < 1)
                  by_logprob += gamma * std::pow(1 - p, gamma - 1) * p * logprob;
                for (size_t v = 0; v < row.logits.size(); ++v) {
                  const double own = std::cmp_equal(v, row.ids[0]) ? 1 : 0;
                  answer.d_logits[v] =
                      g[0] * by_logprob * (own - std::exp(row.logprobs[v])) / row.temperature;
                }
                return answer;
              }};
}

}  // namespace gyre
