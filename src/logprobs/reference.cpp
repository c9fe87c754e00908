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

std::vector<int32_t> columns(std::span<const double> logits) {
  std::vector<int32_t> all(logits.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// Before: a column of a larger logit, NaN before all; of equal ones the larger id when
/// `high_ids_first`, else the smaller.
auto by_rank(std::span<const double> logits, bool high_ids_first) {
  return [logits, high_ids_first](int32_t a, int32_t b) {
    const double x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    if (std::isnan(x) != std::isnan(y)) return std::isnan(x);
    if (x > y || x < y) return x > y;
    return high_ids_first ? a > b : a < b;
  };
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
  const double log_sum = std::log(sum);
  std::vector<double> logprobs;
  logprobs.reserve(logits.size());
  for (const double z : logits) logprobs.push_back((z - max) / temperature - log_sum);
  return logprobs;
}

/// A row of -inf only is no distribution: its entropy is NaN.
TokenScore score_row_reference(std::span<const double> logits, int64_t target, double temperature) {
  const std::vector<double> logprobs = log_softmax_reference(logits, temperature);
  TokenScore score;
  double mass = 0;
  for (size_t v = 0; v < logprobs.size(); ++v) {
    if (logits[v] == -infinity_of<double>) continue;
    const double p = std::exp(logprobs[v]);
    mass += p;
    score.entropy -= p * logprobs[v];
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

std::vector<double> log_softmax_gradient_reference(std::span<const double> logits,
                                                   std::span<const double> g, double temperature) {
  const double sum = std::accumulate(g.begin(), g.end(), 0.0);
  std::vector<double> gradient = log_softmax_reference(logits, temperature);
  for (size_t v = 0; v < gradient.size(); ++v)
    gradient[v] = (g[v] - std::exp(gradient[v]) * sum) / temperature;
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
  const auto before_in_rank = by_rank(logits, true);
  std::vector<int32_t> order = columns(logits);
  if (filter.top_k > 0 && filter.top_k < std::ssize(logits)) {
    const auto last = order.begin() + (filter.top_k - 1);
    std::nth_element(order.begin(), last, order.end(), before_in_rank);
    const double kth = logits[static_cast<size_t>(*last)];
    for (size_t v = 0; v < logits.size(); ++v) kept[v] = !(logits[v] < kth);
  }
  if (filter.top_p == 1) return kept;
  std::vector<double> left(logits.begin(), logits.end());
  for (size_t v = 0; v < left.size(); ++v)
    if (!kept[v]) left[v] = -infinity_of<double>;
  const std::vector<double> logprobs = log_softmax_reference(left, filter.temperature);
  std::erase_if(order, [&](int32_t v) { return !kept[static_cast<size_t>(v)]; });
  std::sort(order.begin(), order.end(), before_in_rank);
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
  std::vector<int32_t> order = columns(logits);
  const auto end = order.begin() + std::min(k, std::ssize(order));
  std::partial_sort(order.begin(), end, order.end(), by_rank(logits, false));
  std::vector<TopEntry> top;
  for (auto id = order.begin(); id != end; ++id)
    top.push_back({logits[static_cast<size_t>(*id)], *id});
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
