#pragma once
// The factor that all values of an array have in common with those expected. A gather of gradients
// that sums over ranks where the caller expects its own slice, or the other way round, multiplies
// an array by the number of ranks.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

namespace gyre {

/// The positive factors f for which |got - f expected| is within the tolerance of every value: an
/// interval, which each value narrows.
class CommonFactor {
 public:
  CommonFactor() = default;
  CommonFactor(double least, double most, int64_t values)
      : least_(least), most_(most), values_(values) {}

  void add(double got, double expected, double tolerance) {
    if (!(least_ <= most_)) return;
    if (got == expected && !std::isfinite(got)) return;  // of any factor
    const double slack = std::max(tolerance, rounding * std::abs(got));
    if (expected == 0) {
      if (!(std::abs(got) <= slack)) most_ = -1;
      return;
    }
    const double a = (got - slack) / expected, b = (got + slack) / expected;
    // Written so that a NaN leaves no factor.
    least_ = a >= least_ || b >= least_ ? std::max(least_, std::min(a, b)) : infinity;
    most_ = std::min(most_, std::max(a, b));
    ++values_;
  }
  void merge(const CommonFactor& other) {
    least_ = std::max(least_, other.least_);
    most_ = std::min(most_, other.most_);
    values_ += other.values_;
  }
  /// "differs by a factor 2: gather convention?", where one whole number of at least 2, or its
  /// inverse, is a factor of all values, and at least two values leave no other.
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
  int64_t values_ = 0;  ///< that say something: expected is not 0
};

}  // namespace gyre
