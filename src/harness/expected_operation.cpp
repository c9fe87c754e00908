#include "harness/expected_operation.hpp"

#include <algorithm>
#include <cmath>

#include "logprobs/reference.hpp"
#include "logprobs/tolerance.hpp"

namespace gyre {

/// Sizes of the derivatives of Σ g_i value_i by the statistics.
struct ExpectedOperation::Sizes {
  std::vector<double> of_ids;
  double entropy = 0, log_sum_exp = 0, mean_logprob = 0;
  double sum = 0;  ///< coefficient of p in the gradient: signed where slopes are exact
};

ExpectedOperation::ExpectedOperation(const OperationCase& of)
    : case_(of), logprobs_(log_softmax_reference(of.logits, of.temperature)) {
  row_.vocab_size = std::ssize(of.logits);
  row_.ids = of.ids;
  row_.inputs = case_.inputs;
  row_.parameters = of.parameters;
  row_.logits = of.logits;
  row_.logprobs = logprobs_;
  row_.temperature = of.temperature;
  for (size_t k = 0; k < of.ids.size(); ++k)
    of_ids_.push_back(!row_.is_id(k)           ? 0
                      : of.operation.on_logits ? of.logits[of.ids[k]]
                                               : logprobs_[of.ids[k]]);
  RowStatistics& statistics = row_.statistics;
  statistics.of_ids = of_ids_;
  const auto top = std::ranges::max_element(of.logits) - of.logits.begin();
  statistics.log_sum_exp = of.logits[top] / of.temperature - logprobs_[top];
  if (of.operation.entropy)
    statistics.entropy = score_row_reference(of.logits, -1, of.temperature).entropy;
  for (const double logprob : logprobs_)
    statistics.mean_logprob += logprob / static_cast<double>(row_.vocab_size);
}

ExpectedOperation::Sizes ExpectedOperation::sizes_of(std::span<const double> g) const {
  const RowOperation& operation = case_.operation;
  Sizes sizes;
  sizes.of_ids.assign(row_.ids.size(), 0);
  RowSlopes slopes;
  slopes.of_ids = sizes.of_ids;
  const bool is_exact = operation.sizes == nullptr && !case_.rounds_terms;
  (operation.sizes == nullptr ? operation.slopes : operation.sizes)(row_, g, slopes);
  const auto add = [&](double slope) { sizes.sum += is_exact ? slope : std::abs(slope); };
  for (double& slope : sizes.of_ids) {
    add(slope);
    slope = std::abs(slope);
  }
  if (slopes.entropy != 0) add(slopes.entropy * row_.statistics.entropy);
  add(slopes.mean_logprob);
  add(-slopes.log_sum_exp);
  sizes.entropy = std::abs(slopes.entropy);
  sizes.mean_logprob = std::abs(slopes.mean_logprob);
  sizes.log_sum_exp = std::abs(slopes.log_sum_exp);
  return sizes;
}

/// Whether a coefficient of the gradient is beyond f32, so that the row has none.
bool ExpectedOperation::leaves_f32(std::span<const double> g) const {
  if (case_.operation.on_logits) return false;
  std::vector<double> of_ids(row_.ids.size(), 0);
  RowSlopes slopes;
  slopes.of_ids = of_ids;
  case_.operation.slopes(row_, g, slopes);
  double sum = slopes.mean_logprob - slopes.log_sum_exp;
  for (const double slope : of_ids) sum += slope;
  if (slopes.entropy != 0) sum += slopes.entropy * row_.statistics.entropy;
  const auto is_beyond = [](double x) { return std::isinf(static_cast<float>(x)); };
  return is_beyond(slopes.log_sum_exp) || is_beyond(sum / row_.temperature) ||
         is_beyond(slopes.entropy / row_.temperature);
}

double ExpectedOperation::entropy_error() const {
  return entropy_scale(row_.vocab_size);
}

/// Error scale of a result that is a function of statistics; `unit`: 1 for the result, else 0.
double ExpectedOperation::error_of_sum(double value, std::span<const double> unit) const {
  const Sizes sizes = sizes_of(unit);
  double scale = logprob_scale(value);
  for (size_t k = 0; k < sizes.of_ids.size(); ++k)
    if (sizes.of_ids[k] != 0 && std::isfinite(of_ids_[k]))
      scale += sizes.of_ids[k] * logprob_scale(of_ids_[k]);
  const double origin = logprob_scale(row_.statistics.log_sum_exp);
  if (sizes.log_sum_exp != 0) scale += sizes.log_sum_exp * origin;
  if (sizes.mean_logprob != 0)
    scale += sizes.mean_logprob * (logprob_scale(row_.statistics.mean_logprob) + origin);
  return scale + sizes.entropy * entropy_error();
}

ExpectedRow ExpectedOperation::values(size_t i) const {
  const RowOperation& operation = case_.operation;
  const int64_t ids = std::ssize(row_.ids);
  const std::vector<double> none(operation.width(ids), 0);
  const std::vector<double> all = operation.define(row_, none).values;
  size_t first = 0;
  for (size_t before = 0; before < i; ++before)
    first += operation.width_of(operation.results[before], ids);
  const RowResult& result = operation.results[i];
  const size_t end = first + operation.width_of(result, ids);
  ExpectedRow want;
  for (size_t at = first; at < end; ++at) {
    const double value = all[at];
    want.values.push_back(value);
    want.undefined = want.undefined || std::isnan(value);
    double scale = 1;
    if (result.error == RowError::logprob) scale = logprob_scale(value);
    if (result.error == RowError::entropy) scale = entropy_error();
    if (result.error == RowError::sum && std::isfinite(value)) {
      std::vector<double> unit(all.size(), 0);
      unit[at] = 1;
      scale = error_of_sum(value, unit);
    }
    want.scales.push_back(scale);
  }
  return want;
}

ExpectedRow ExpectedOperation::gradient(std::span<const double> g) const {
  const RowOperation& operation = case_.operation;
  ExpectedRow want{std::vector<double>(row_.logits.size(), 0), {}};
  want.scales.assign(row_.logits.size(), 1);
  if (std::ranges::all_of(g, [](double x) { return x == 0; })) return want;
  want.values = operation.define(row_, g).d_logits;
  if (leaves_f32(g)) std::ranges::fill(want.values, std::nan(""));
  want.undefined = std::ranges::any_of(want.values, [](double x) { return std::isnan(x); });
  if (want.undefined) {
    for (size_t v = 0; v < want.scales.size(); ++v)
      if (row_.logits[v] == -HUGE_VAL && !operation.on_logits) want.scales[v] = -1;
    return want;
  }
  const Sizes sizes = sizes_of(g);
  std::vector<double> weights(row_.logits.size(), sizes.mean_logprob / row_.temperature /
                                                      static_cast<double>(row_.vocab_size));
  for (size_t k = 0; k < row_.ids.size(); ++k)
    if (row_.is_id(k)) weights[row_.ids[k]] += sizes.of_ids[k] / row_.temperature;
  for (size_t v = 0; v < weights.size(); ++v)
    want.scales[v] = operation.on_logits
                         ? logit_gradient_scale(-HUGE_VAL, 0, 0, weights[v])
                         : logit_gradient_scale(logprobs_[v], sizes.sum / row_.temperature,
                                                sizes.entropy / row_.temperature, weights[v]);
  return want;
}

}  // namespace gyre
