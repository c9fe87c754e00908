#pragma once
// Statistics of repeated measurements.

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

/// Raw measurements [rank][iteration].
using Samples = std::vector<std::vector<double>>;

struct Statistics {
  int64_t count = 0;
  double min = 0;
  double median = 0;
  double p95 = 0;
  double mean = 0;
  double cv = 0;  ///< sample standard deviation / mean; NaN for fewer than two samples
  /// 95 % confidence interval of the median, see median_interval().
  double median_low = 0, median_high = 0;
  /// The larger distance of the interval's ends from the median, over the median; NaN: unknown.
  double half_width() const;
};

/// Distribution-free confidence interval of the median, at least 95 %. Its ends are two order
/// statistics, chosen by the binomial distribution (Hollander, Wolfe: Nonparametric Statistical
/// Methods, 3.6). NaN for fewer than 6 samples, whose whole range does not reach 95 %.
struct Interval {
  double low, high;
};
Interval median_interval(std::span<const double> sorted);

/// All values but the count are NaN if there is no sample or a sample is NaN.
Statistics summarize(std::span<const double> samples);

/// The q-quantile, 0 <= q <= 1, interpolated linearly between the two nearest samples (q = 0.5: the
/// median).
double quantile(std::span<const double> samples, double q);

/// Time of each iteration: the maximum over ranks. All ranks have the same number of iterations.
std::vector<double> slowest_rank(const Samples& samples);

/// max / mean - 1 of one value per rank: 0 is perfect balance. NaN when the mean is 0.
double imbalance(std::span<const double> values);

/// The samples of all ranks, on every rank. Collective; counts may differ.
Samples gather_samples(Communicator& comm, std::span<const double> mine);

}  // namespace gyre
