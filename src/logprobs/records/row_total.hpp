#pragma once
// Merges the partials of parts of a row's columns: blocks, tiles or ranks.

#include <cmath>
#include <limits>

#include "core/host_device.hpp"
#include "logprobs/rows/row_statistics.hpp"

namespace gyre {

/// Totals in f64. The bits depend only on the order of the parts.
struct RowTotal {
  float max = -std::numeric_limits<float>::infinity();
  double sum = 0, weighted = 0, total = 0;

  /// A part with only -inf has sum 0 and adds nothing but its total. A part with NaN has sum NaN,
  /// whatever its maximum, and makes the total NaN.
  GYRE_HOST_DEVICE void add(const SoftmaxPartial& part, double scale) {
    total += part.total;
    if (part.sum == 0) return;
    const double old_max = max, part_max = part.max;
    if (max < part.max) max = part.max;
    const double new_max = max;
    count_from(sum, weighted, (old_max - new_max) * scale);
    double part_sum = part.sum;
    double part_weighted = part.weighted;
    count_from(part_sum, part_weighted, (part_max - new_max) * scale);
    sum += part_sum;
    weighted += part_weighted;
  }

  GYRE_HOST_DEVICE SoftmaxPartial partials() const {
    return {max, static_cast<float>(sum), static_cast<float>(weighted), static_cast<float>(total)};
  }

  /// Log-probability of a column with logit z, and entropy (nats, at least 0, or NaN); `log_sum` is
  /// the logarithm of `sum`.
  GYRE_HOST_DEVICE float logprob(float z, double scale, double log_sum) const {
    return static_cast<float>((z - static_cast<double>(max)) * scale - log_sum);
  }
  GYRE_HOST_DEVICE float entropy(double log_sum) const {
    const double h = log_sum - weighted / sum;
    return static_cast<float>(h < 0 ? 0 : h);  // rounding may go below 0; NaN stays
  }
  /// Mean of the log-probabilities of all `ids` of the vocabulary.
  GYRE_HOST_DEVICE float mean_logprob(int64_t ids, double scale, double log_sum) const {
    const double mean = total / sum_unit / static_cast<double>(ids);
    return static_cast<float>((mean - static_cast<double>(max)) * scale - log_sum);
  }

 private:
  /// Rescales partials to the new maximum; shift = (old maximum - new maximum) · scale, at most 0.
  GYRE_HOST_DEVICE static void count_from(double& of_sum, double& of_weighted, double shift) {
    if (of_sum == 0 || shift == 0) return;
    const double factor = std::exp(shift);
    of_weighted = (of_weighted + shift * of_sum) * factor;
    of_sum *= factor;
  }
};

}  // namespace gyre
