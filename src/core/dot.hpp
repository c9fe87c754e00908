// Sums of products in double precision, for reference implementations.
#pragma once

#include <array>
#include <cstdint>

namespace gyre {

/// Σ a[i] b[i] over n elements. Eight partial sums in a fixed order let the compiler use vectors.
template <class A, class B>
double dot(const A* a, const B* b, int64_t n) {
  constexpr int64_t lanes = 8;
  std::array<double, lanes> sums{};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int64_t l = 0; l < lanes; ++l)
      sums[l] += static_cast<double>(a[i + l]) * static_cast<double>(b[i + l]);
  for (; i < n; ++i) sums[0] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

/// y += factor · x, n elements.
template <class T>
void add_scaled(double* y, double factor, const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += factor * static_cast<double>(x[i]);
}

}  // namespace gyre
