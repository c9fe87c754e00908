#pragma once
// Comparison of f32 results with double-precision references.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <span>

namespace gyre::test {

/// Error allowed for f32, relative to the sum of the magnitudes of a result's terms: u·(8 +
/// 2·sqrt(terms)) with u = 2^-24. Rounding errors of `terms` additions behave like a random walk; 8
/// covers the handful of roundings outside the sum.
inline double rounding(double terms) {
  return 0x1p-24 * (8 + 2 * std::sqrt(terms));
}

/// got[i] within tolerance(i) of want[i]. Infinities must match; NaN never does.
template <class Want>
void expect_close(std::span<const float> got, std::span<Want> want,
                  const std::function<double(size_t)>& tolerance) {
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const auto x = static_cast<double>(got[i]), y = static_cast<double>(want[i]);
    if (x == y) continue;
    const double share = std::abs(x - y) / tolerance(i);
    if (!(share <= worst)) worst = share, at = i;
    if (std::isnan(worst)) break;
  }
  EXPECT_LE(worst, 1) << "err/tol at element " << at << ": " << got[at] << ", expected "
                      << want[at];
}

/// Fills with standard normal numbers.
inline void fill_normal(std::span<float> values, std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (float& x : values) x = normal(random);
}

}  // namespace gyre::test
