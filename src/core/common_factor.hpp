#pragma once
// Factor between all values of an array and the expected ones. If a gather of gradients sums over
// ranks where the caller expects its own slice, or vice versa, the array is off by the number of
// ranks.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

namespace gyre {

/// Interval of the positive factors f for which |got - f expected| is within tolerance for every
/// value; each value narrows it.
class CommonFactor {
 public:
  CommonFactor() = default;
  CommonFactor(double least, double most, int64_t values)
      : least_(least), most_(most), values_(values) {}

  void add(double got, double expected, double tolerance) {
    if (!(least_ <= most_)) return;
    if (got == expected && !std::isfinite(got)) return;  // any factor fits
    const double slack = std::max(tolerance, rounding * std::abs(got));
    if (expected == 0) {
      if (!(std::abs(got) <= slack)) most_ = -1;
      return;
    }
    const double a = (got - slack) / expected, b = (got + slack) / expected;
    // Comparisons with NaN are false, so that a NaN leaves no finite factor.
    least_ = a >= least_ || b >= least_ ? std::max(least_, std::min(a, b)) : infinity;
    most_ = std::min(most_, std::max(a, b));
    ++values_;
  }
  void merge(const CommonFactor& other) {
    least_ = std::max(least_, other.least_);
    most_ = std::min(most_, other.most_);
    values_ += other.values_;
  }
  /// Returns "differs by a factor 2: gather convention?" if a whole number of at least 2, or its
  /// inverse, is the only such factor and at least two values determine it; "" otherwise.
  std::string hint() const {
    if (values_ < 2 || !(least_ > 0 && least_ <= most_ && most_ <= widest * least_)) return "";
    for (const bool inverse : {false, true}) {
      const double first = std::ceil(inverse ? 1 / most_ : least_),
                   last = std::floor(inverse ? 1 / least_ : most_);
      if (first == last && first >= 2 && first <= largest)
        return fmt::format("differs by a factor {}{:.0f}: gather convention?", inverse ? "1/" : "",
                           first);
    }
    return "";
  }
  double least() const { return least_; }
  double most() const { return most_; }
  int64_t values() const { return values_; }

 private:
  static constexpr double infinity = std::numeric_limits<double>::infinity();
  static constexpr double rounding = 0x1p-20, widest = 1.1, largest = 0x1p16;

  double least_ = 0, most_ = infinity;
  int64_t values_ = 0;  ///< number of values with expected != 0
};

}  // namespace gyre
