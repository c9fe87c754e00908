#include "report/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "comm/agree.hpp"
#include "core/error.hpp"

namespace gyre {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

double mean_of(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / values.size();
}

double quantile_of_sorted(const std::vector<double>& sorted, double q) {
  const double position = q * (sorted.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], position - below);
}

bool usable(std::span<const double> samples) {
  return !samples.empty() &&
         std::none_of(samples.begin(), samples.end(), [](double x) { return std::isnan(x); });
}

}  // namespace

double Statistics::half_width() const {
  return std::max(median_high - median, median - median_low) / median;
}

Interval median_interval(std::span<const double> sorted) {
  const double n = sorted.size();
  // The k-th samples from both ends bound the interval. sum: P(at most k are below the median).
  size_t k = 0;
  if (sorted.size() > 1000) {
    k = static_cast<size_t>(n / 2 - 0.98 * std::sqrt(n));
  } else {
    double probability = std::pow(0.5, n), sum = probability;
    while (sum <= 0.025) {
      ++k;
      probability *= (n - k + 1) / k;
      sum += probability;
    }
  }
  if (k == 0) return {nan, nan};
  return {sorted[k - 1], sorted[sorted.size() - k]};
}

Statistics summarize(std::span<const double> samples) {
  Statistics result{.count = std::ssize(samples),
                    .min = nan,
                    .median = nan,
                    .p95 = nan,
                    .mean = nan,
                    .cv = nan,
                    .median_low = nan,
                    .median_high = nan};
  if (!usable(samples)) return result;
  std::vector<double> sorted(samples.begin(), samples.end());
  std::sort(sorted.begin(), sorted.end());
  result.min = sorted.front();
  result.median = quantile_of_sorted(sorted, 0.5);
  result.p95 = quantile_of_sorted(sorted, 0.95);
  result.mean = mean_of(samples);
  const Interval interval = median_interval(sorted);
  result.median_low = interval.low, result.median_high = interval.high;
  double squares = 0;
  for (double x : samples) squares += (x - result.mean) * (x - result.mean);
  const double n = samples.size();
  if (samples.size() > 1 && result.mean != 0)
    result.cv = std::sqrt(squares / (n - 1)) / std::abs(result.mean);
  return result;
}

double quantile(std::span<const double> samples, double q) {
  GYRE_CHECK(q >= 0 && q <= 1, "quantile {}", q);
  if (!usable(samples)) return nan;
  std::vector<double> sorted(samples.begin(), samples.end());
  std::sort(sorted.begin(), sorted.end());
  return quantile_of_sorted(sorted, q);
}

std::vector<double> slowest_rank(const Samples& samples) {
  if (samples.empty()) return {};
  std::vector<double> slowest = samples[0];
  for (const std::vector<double>& rank : samples) {
    GYRE_CHECK(rank.size() == slowest.size(), "{} and {} iterations", rank.size(), slowest.size());
    for (size_t i = 0; i < rank.size(); ++i)
      if (rank[i] > slowest[i] || std::isnan(rank[i])) slowest[i] = rank[i];  // keeps NaN
  }
  return slowest;
}

double imbalance(std::span<const double> values) {
  if (!usable(values)) return nan;
  const double mean = mean_of(values);
  return mean == 0 ? nan : *std::max_element(values.begin(), values.end()) / mean - 1;
}

Samples gather_samples(Communicator& comm, std::span<const double> mine) {
  std::vector<int64_t> bytes = all_gather_value(comm, std::ssize(mine));
  const int64_t count = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  for (int64_t& b : bytes) b *= sizeof(double);
  std::vector<double> all(count);
  HostStream stream;
  comm.all_gather_v(bytes_of(mine), writable_bytes_of(std::span<double>(all)), bytes, stream,
                    "gathering measurements")
      ->wait();
  Samples samples;
  auto next = all.begin();
  for (const int64_t b : bytes) {
    const auto end = next + b / static_cast<int64_t>(sizeof(double));
    samples.emplace_back(next, end);
    next = end;
  }
  return samples;
}

}  // namespace gyre
