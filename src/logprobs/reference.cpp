#include "logprobs/reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/special_values.hpp"

namespace gyre {
namespace {

bool has(std::span<const double> row, int64_t id) {
  return id >= 0 && id < std::ssize(row);
}

/// Columns by descending logit, NaN before all; equal ones by descending id when `high_ids_first`,
/// else ascending.
std::vector<int32_t> ranked(std::span<const double> logits, bool high_ids_first) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const double x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    if (std::isnan(x) != std::isnan(y)) return std::isnan(x);
    if (x > y || x < y) return x > y;
    return high_ids_first ? a > b : a < b;
  });
  return order;
}

/// The logits with -inf for those that did not survive.
std::vector<double> filtered(std::span<const double> logits, const SamplingFilter& filter) {
  const std::vector<bool> kept = filter_reference(logits, filter);
  std::vector<double> left(logits.begin(), logits.end());
  for (size_t v = 0; v < left.size(); ++v)
    if (!kept[v]) left[v] = -infinity_of<double>;
  return left;
}

std::vector<double> gathered(std::span<const double> row, std::span<const int32_t> ids) {
  std::vector<double> values;
  for (const int32_t id : ids) values.push_back(row[static_cast<size_t>(id)]);
  return values;
}

}  // namespace

std::vector<double> log_softmax_reference(std::span<const double> logits, double temperature) {
  double max = -infinity_of<double>;
  for (const double z : logits) max = std::max(max, z);
  double sum = 0;
  for (const double z : logits)
    if (z != -infinity_of<double>) sum += std::exp((z - max) / temperature);
  std::vector<double> logprobs;
  for (const double z : logits) logprobs.push_back((z - max) / temperature - std::log(sum));
  return logprobs;
}

/// A row of -inf only is no distribution: its entropy is NaN.
TokenScore score_row_reference(std::span<const double> logits, int64_t target, double temperature) {
  const std::vector<double> logprobs = log_softmax_reference(logits, temperature);
  TokenScore score;
  double mass = 0;
  for (size_t v = 0; v < logprobs.size(); ++v) {
    if (logits[v] == -infinity_of<double>) continue;
    mass += std::exp(logprobs[v]);
    score.entropy -= std::exp(logprobs[v]) * logprobs[v];
  }
  if (mass == 0) score.entropy = std::numeric_limits<double>::quiet_NaN();
  if (has(logits, target)) score.logprob = logprobs[static_cast<size_t>(target)];
  return score;
}

std::vector<double> score_gradient_reference(std::span<const double> logits,
                                             std::span<const int32_t> ids,
                                             std::span<const double> g, double h,
                                             double temperature) {
  const std::vector<double> logprobs = log_softmax_reference(logits, temperature);
  const double entropy = score_row_reference(logits, -1, temperature).entropy;
  const double sum = std::accumulate(g.begin(), g.end(), 0.0);
  std::vector<double> gradient(logits.size(), 0);
  for (size_t v = 0; v < logits.size(); ++v) {
    if (logits[v] == -infinity_of<double>) continue;
    const double p = std::exp(logprobs[v]);
    gradient[v] = -p * sum;
    if (h != 0) gradient[v] -= h * p * (logprobs[v] + entropy);
  }
  for (size_t k = 0; k < ids.size(); ++k)
    if (has(logits, ids[k])) gradient[static_cast<size_t>(ids[k])] += g[k];
  for (double& x : gradient) x /= temperature;
  return gradient;
}

double soft_cross_entropy_reference(std::span<const double> student,
                                    std::span<const double> teacher) {
  const std::vector<double> log_q = log_softmax_reference(student);
  const std::vector<double> log_p = log_softmax_reference(teacher);
  double sum = 0, mass = 0;
  for (size_t v = 0; v < log_q.size(); ++v) {
    if (teacher[v] == -infinity_of<double>) continue;
    const double p = std::exp(log_p[v]);  // 0 for a very small one
    mass += p;
    sum -= log_q[v] == -infinity_of<double> ? -infinity_of<double> : p * log_q[v];
  }
  return mass > 0 ? sum : std::numeric_limits<double>::quiet_NaN();
}

std::vector<double> soft_cross_entropy_gradient_reference(std::span<const double> student,
                                                          std::span<const double> teacher,
                                                          double g) {
  const std::vector<double> log_q = log_softmax_reference(student);
  const std::vector<double> log_p = log_softmax_reference(teacher);
  std::vector<double> gradient;
  for (size_t v = 0; v < log_q.size(); ++v)
    gradient.push_back(g * (std::exp(log_q[v]) - std::exp(log_p[v])));
  return gradient;
}

std::vector<bool> filter_reference(std::span<const double> logits, const SamplingFilter& filter) {
  std::vector<bool> kept(logits.size(), true);
  if (logits.empty()) return kept;
  const std::vector<int32_t> order = ranked(logits, true);
  const auto size = static_cast<int64_t>(logits.size());
  if (filter.top_k > 0 && filter.top_k < size) {
    const double kth = logits[static_cast<size_t>(order[static_cast<size_t>(filter.top_k - 1)])];
    for (size_t v = 0; v < logits.size(); ++v) kept[v] = !(logits[v] < kth);
  }
  if (filter.top_p == 1) return kept;
  std::vector<double> left(logits.begin(), logits.end());
  for (size_t v = 0; v < left.size(); ++v)
    if (!kept[v]) left[v] = -infinity_of<double>;
  const std::vector<double> logprobs = log_softmax_reference(left, filter.temperature);
  double before = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const auto v = static_cast<size_t>(order[i]);
    if (i > 0 && !(before < filter.top_p)) kept[v] = false;
    if (left[v] != -infinity_of<double>) before += std::exp(logprobs[v]);
  }
  return kept;
}

double filtered_logprob_reference(std::span<const double> logits, int64_t target,
                                  const SamplingFilter& filter) {
  if (!has(logits, target)) return -infinity_of<double>;
  return log_softmax_reference(filtered(logits, filter),
                               filter.temperature)[static_cast<size_t>(target)];
}

std::vector<double> filtered_gradient_reference(std::span<const double> logits, int64_t target,
                                                const SamplingFilter& filter, double g) {
  const std::vector<double> left = filtered(logits, filter);
  const std::vector<double> logprobs = log_softmax_reference(left, filter.temperature);
  std::vector<double> gradient;
  for (const double x : logprobs) gradient.push_back(-g * std::exp(x) / filter.temperature);
  if (has(logits, target) && left[static_cast<size_t>(target)] != -infinity_of<double>)
    gradient[static_cast<size_t>(target)] += g / filter.temperature;
  return gradient;
}

std::vector<TopEntry> top_k_reference(std::span<const double> logits, int64_t k) {
  std::vector<TopEntry> top;
  for (const int32_t id : ranked(logits, false)) {
    if (std::ssize(top) == k) break;
    top.push_back({logits[static_cast<size_t>(id)], id});
  }
  return top;
}

DistillationReference distillation_reference(std::span<const double> student,
                                             std::span<const int32_t> ids,
                                             std::span<const double> teacher_logits,
                                             bool renormalise) {
  DistillationReference result;
  result.student = renormalise ? log_softmax_reference(gathered(student, ids))
                               : gathered(log_softmax_reference(student), ids);
  result.teacher = log_softmax_reference(teacher_logits);
  result.entropy = score_row_reference(student, -1).entropy;
  return result;
}

std::vector<double> distillation_gradient_reference(std::span<const double> student,
                                                    std::span<const int32_t> ids,
                                                    std::span<const double> g, double h,
                                                    bool renormalise) {
  if (!renormalise) return score_gradient_reference(student, ids, g, h);
  std::vector<int32_t> places(ids.size());
  std::iota(places.begin(), places.end(), 0);
  const std::vector<double> of_places =
      score_gradient_reference(gathered(student, ids), places, g, 0);
  std::vector<double> gradient(student.size(), 0);
  for (size_t k = 0; k < ids.size(); ++k) gradient[static_cast<size_t>(ids[k])] += of_places[k];
  return gradient;
}

}  // namespace gyre
