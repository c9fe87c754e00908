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

/// Order by descending logit, NaN first; equal logits by descending id if `high_ids_first`, else by
/// ascending id.
auto by_rank(std::span<const double> logits, bool high_ids_first) {
  return [logits, high_ids_first](int32_t a, int32_t b) {
    const double x = logits[a], y = logits[b];
    if (std::isnan(x) != std::isnan(y)) return std::isnan(x);
    if (x > y || x < y) return x > y;
    return high_ids_first ? a > b : a < b;
  };
}

std::vector<double> gathered(std::span<const double> row, std::span<const int32_t> ids) {
  std::vector<double> values;
  for (const int32_t id : ids) values.push_back(row[id]);
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

/// A row with only -inf is no distribution: its entropy is NaN.
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
  if (has(logits, target)) score.logprob = logprobs[target];
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
    if (has(logits, ids[k])) gradient[ids[k]] += g[k];
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
    const double p = std::exp(log_p[v]);  // 0 for very small probabilities
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

SurvivorsReference::SurvivorsReference(std::span<const double> logits, const SamplingFilter& filter,
                                       double margin)
    : logits_(logits),
      max_(-infinity_of<double>),
      temperature_(filter.temperature),
      order_(columns(logits)),
      sums_{0} {
  if (filter.top_k > 0 && filter.top_k < std::ssize(logits)) {
    const auto last = order_.begin() + (filter.top_k - 1);
    std::nth_element(order_.begin(), last, order_.end(), by_rank(logits, true));
    const double kth = logits[*last];
    std::erase_if(order_, [&](int32_t v) { return logits[v] < kth; });
  }
  for (const double z : logits) max_ = std::max(max_, z);
  std::erase_if(order_, [&](int32_t v) { return !filter.is_likely(logits[v], max_, margin); });
  std::sort(order_.begin(), order_.end(), by_rank(logits, true));
  for (const int32_t v : order_) {
    const double z = logits[v];
    sums_.push_back(sums_.back() +
                    (z == -infinity_of<double> ? 0 : std::exp((z - max_) / temperature_)));
  }
  const int64_t all = std::ssize(order_);
  // Number of columns that min_p keeps.
  const auto likely = [&](double slack) {
    return std::ranges::count_if(
        order_, [&](int32_t v) { return filter.is_likely(logits[v], max_, slack); });
  };
  usual_ = likely(0);
  fewest_ = likely(-margin);
  most_ = all;
  if (filter.top_p == 1 || all == 0) return;
  // Number of the first `count` columns up to a share of `limit` of their sum; at least one,
  // because the largest always survives.
  const auto before = [&](double limit, int64_t count) {
    int64_t n = 1;
    while (n < count && sums_[n] < limit * sums_[count]) ++n;
    return n;
  };
  usual_ = before(filter.top_p, usual_);
  fewest_ = before(filter.top_p - margin, fewest_);
  most_ = before(filter.top_p + margin, most_);
}

int64_t SurvivorsReference::rank(int64_t id) const {
  if (!has(logits_, id)) return std::ssize(order_);
  const auto place = std::lower_bound(order_.begin(), order_.end(), static_cast<int32_t>(id),
                                      by_rank(logits_, true));
  return place != order_.end() && *place == id ? place - order_.begin() : std::ssize(order_);
}

/// Returns NaN if the row is no distribution.
double SurvivorsReference::log_sum(int64_t survivors) const {
  const double sum = sums_[survivors];
  return sum > 0 ? std::log(sum) : std::numeric_limits<double>::quiet_NaN();
}

double SurvivorsReference::logprob(int64_t id, int64_t survivors) const {
  const double log_sum = SurvivorsReference::log_sum(survivors);
  if (!has(logits_, id)) return -infinity_of<double>;
  if (rank(id) >= survivors && !std::isnan(log_sum)) return -infinity_of<double>;
  return (logits_[id] - max_) / temperature_ - log_sum;
}

std::vector<double> SurvivorsReference::logprobs(int64_t survivors) const {
  const double log_sum = SurvivorsReference::log_sum(survivors);
  std::vector<double> all(logits_.size(), std::isnan(log_sum) ? log_sum : -infinity_of<double>);
  for (const int32_t v : ranked().first(survivors))
    all[v] = (logits_[v] - max_) / temperature_ - log_sum;
  return all;
}

int64_t SurvivorsReference::nearest(int64_t id, double value) const {
  const int64_t place = rank(id);
  const bool survives = value > -infinity_of<double>;
  const int64_t low = survives ? std::max(fewest_, place + 1) : fewest_,
                high = survives ? most_ : std::min(most_, place);
  if (low > high || std::isnan(value)) return usual_;
  if (!survives) return std::clamp(usual_, low, high);
  const double sum = std::exp((logits_[id] - max_) / temperature_ - value);
  const auto end = sums_.begin() + high;
  const auto above = std::lower_bound(sums_.begin() + low, end, sum);  // `end` is valid too
  const bool is_first = above == sums_.begin() + low;
  return above - sums_.begin() - (!is_first && sum - *(above - 1) < *above - sum ? 1 : 0);
}

/// Rank at which the group of logits equal to the first doubtful one begins.
int64_t SurvivorsReference::first_doubtful() const {
  const auto value = [&](int64_t i) { return logits_[order_[i]]; };
  int64_t first = fewest_;
  while (first > 0 && fewest_ < most_ && value(first - 1) == value(fewest_)) --first;
  return first;
}

std::span<const int32_t> SurvivorsReference::doubtful() const {
  const auto at = [&](int64_t i) { return order_[i]; };
  const auto value = [&](int64_t i) { return logits_[at(i)]; };
  int64_t end = most_;
  while (fewest_ < most_ && end < std::ssize(order_) && value(end) == value(most_ - 1)) ++end;
  const int64_t first = first_doubtful();
  return std::span(order_).subspan(first, end - first);
}

int64_t SurvivorsReference::with_doubtful(int64_t kept) const {
  return std::clamp(first_doubtful() + kept, fewest_, most_);
}

std::vector<bool> filter_reference(std::span<const double> logits, const SamplingFilter& filter) {
  const SurvivorsReference survivors(logits, filter);
  std::vector<bool> kept(logits.size(), false);
  for (const int32_t v : survivors.ranked().first(survivors.usual())) kept[v] = true;
  return kept;
}

double filtered_logprob_reference(std::span<const double> logits, int64_t target,
                                  const SamplingFilter& filter) {
  const SurvivorsReference survivors(logits, filter);
  return survivors.logprob(target, survivors.usual());
}

std::vector<double> filtered_gradient_reference(std::span<const double> logits, int64_t target,
                                                const SamplingFilter& filter, double g) {
  const SurvivorsReference survivors(logits, filter);
  const std::vector<double> logprobs = survivors.logprobs(survivors.usual());
  std::vector<double> gradient;
  for (const double x : logprobs) gradient.push_back(-g * std::exp(x) / filter.temperature);
  if (has(logits, target) && logprobs[target] != -infinity_of<double>)
    gradient[target] += g / filter.temperature;
  return gradient;
}

double kept_logprob_reference(std::span<const double> logits, std::span<const int32_t> kept,
                              int64_t target, double temperature) {
  if (kept.empty()) return -infinity_of<double>;
  const std::vector<double> among = log_softmax_reference(gathered(logits, kept), temperature);
  if (std::ranges::all_of(kept, [&](int32_t v) { return logits[v] == -infinity_of<double>; }))
    return std::numeric_limits<double>::quiet_NaN();
  const auto place = std::ranges::find(kept, target) - kept.begin();
  return place == std::ssize(kept) ? -infinity_of<double> : among[place];
}

std::vector<double> kept_gradient_reference(std::span<const double> logits,
                                            std::span<const int32_t> kept, int64_t target, double g,
                                            double temperature) {
  std::vector<double> gradient(logits.size(), 0);
  if (kept.empty() || g == 0) return gradient;
  const std::vector<double> among = log_softmax_reference(gathered(logits, kept), temperature);
  for (size_t k = 0; k < kept.size(); ++k) {
    const bool is_target = kept[k] == target && logits[kept[k]] != -infinity_of<double>;
    gradient[kept[k]] = g * ((is_target ? 1 : 0) - std::exp(among[k])) / temperature;
  }
  return gradient;
}

std::vector<TopEntry> top_k_reference(std::span<const double> logits, int64_t k) {
  std::vector<int32_t> order = columns(logits);
  const auto end = order.begin() + std::min(k, std::ssize(order));
  std::partial_sort(order.begin(), end, order.end(), by_rank(logits, false));
  std::vector<TopEntry> top;
  for (auto id = order.begin(); id != end; ++id) top.push_back({logits[*id], *id});
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
  for (size_t k = 0; k < ids.size(); ++k) gradient[ids[k]] += of_places[k];
  return gradient;
}

std::vector<double> projected_reference(std::span<const double> logits,
                                        const SparseMatrixRef& matrix, double temperature) {
  std::vector<double> projected(matrix.width, 0);
  double sum = 0;
  const std::vector<double> logprobs = log_softmax_reference(logits, temperature);
  for (size_t v = 0; v < logprobs.size(); ++v) {
    const double p = std::exp(logprobs[v]);
    sum += p;
    for (int64_t e = matrix.offsets[v]; e < matrix.offsets[v + 1]; ++e)
      projected[matrix.columns[e]] += p * static_cast<double>(matrix.weights[e]);
  }
  if (std::isnan(sum)) std::ranges::fill(projected, sum);
  return projected;
}

std::vector<double> projected_gradient_reference(std::span<const double> logits,
                                                 const SparseMatrixRef& matrix,
                                                 std::span<const double> g, double temperature) {
  std::vector<double> gradient(logits.size(), 0);
  if (std::ranges::all_of(g, [](double x) { return x == 0; })) return gradient;
  const std::vector<double> logprobs = log_softmax_reference(logits, temperature);
  double centre = 0;
  for (size_t v = 0; v < gradient.size(); ++v) {
    for (int64_t e = matrix.offsets[v]; e < matrix.offsets[v + 1]; ++e)
      gradient[v] += g[matrix.columns[e]] * static_cast<double>(matrix.weights[e]);
    centre += std::exp(logprobs[v]) * gradient[v];
  }
  for (size_t v = 0; v < gradient.size(); ++v)
    gradient[v] = std::exp(logprobs[v]) * (gradient[v] - centre) / temperature;
  return gradient;
}

TopKDivergenceReference top_k_divergence_reference(std::span<const double> student,
                                                   std::span<const int32_t> ids,
                                                   std::span<const double> log_p, int64_t target,
                                                   bool unbiased) {
  const std::vector<double> log_q = log_softmax_reference(student);
  TopKDivergenceReference of;
  for (size_t k = 0; k < ids.size(); ++k) {
    const double own = log_q[ids[k]], q = std::exp(own);
    of.ids.push_back(ids[k]);
    of.log_q.push_back(own);
    of.log_p.push_back(log_p[k]);
    of.slopes.push_back(own == -infinity_of<double> ? 0 : q * (own - log_p[k] + 1));
    if (own == -infinity_of<double>) continue;
    of.value += log_p[k] == -infinity_of<double> ? infinity_of<double> : q * (own - log_p[k]);
  }
  if (!has(student, target) || std::ranges::find(ids, target) != ids.end()) return of;
  const double own = log_q[target], other = log_p.back();
  of.ids.push_back(static_cast<int32_t>(target));
  of.log_q.push_back(own);
  of.log_p.push_back(other);
  of.slopes.push_back(own - other + (unbiased ? 1 : 0));
  of.value += own == -infinity_of<double> ? own : own - other;
  return of;
}

TopKDivergenceReference top_k_divergence_reference(std::span<const double> student, int64_t k,
                                                   std::span<const double> teacher, int64_t target,
                                                   bool unbiased) {
  const std::vector<double> log_p = log_softmax_reference(teacher);
  std::vector<int32_t> ids;
  for (const TopEntry& entry : top_k_reference(student, k)) ids.push_back(entry.id);
  std::vector<double> some = gathered(log_p, ids);
  some.push_back(has(teacher, target) ? log_p[target] : 0);
  return top_k_divergence_reference(student, ids, some, target, unbiased);
}

std::vector<double> top_k_divergence_gradient_reference(std::span<const double> student,
                                                        const TopKDivergenceReference& of,
                                                        double g) {
  if (g == 0) return std::vector<double>(student.size(), 0);
  if (!of.has_gradient()) return std::vector<double>(student.size(), std::nan(""));
  std::vector<double> terms;
  for (const double slope : of.slopes) terms.push_back(g * slope);
  const auto leaves_f32 = [](double x) { return !std::isfinite(static_cast<float>(x)); };
  if (std::ranges::any_of(terms, leaves_f32))
    return std::vector<double>(student.size(), std::nan(""));
  return score_gradient_reference(student, of.ids, terms, 0);
}

}  // namespace gyre
