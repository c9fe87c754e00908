#include "core/tolerance.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"

namespace gyre {

double epsilon_of(DType type) {
  switch (type) {
    case DType::f32:
      return std::numeric_limits<float>::epsilon();
    case DType::bf16:
      return 0x1p-7;
    case DType::f64:
      return std::numeric_limits<double>::epsilon();
    case DType::i32:
    case DType::i64:
      return 0;
  }
  return 0;
}

double storage_scale(DType stored, double tolerance) {
  return stored == DType::bf16 ? epsilon_of(DType::bf16) / 2 / tolerance : 0;
}

CommonErrors common_error_limits(double sigma, double values, double squares) {
  const double few = 1 / std::sqrt(values), bias = sigma * (0.3 + 4 * few);
  return {2 * sigma * (1 + 2 * few), bias, bias / std::sqrt(squares / values)};
}

double tolerance_for(DType type, int64_t roundings) {
  GYRE_CHECK(roundings >= 0, "{} roundings", roundings);
  const double sigma = epsilon_of(type) / 6 * std::sqrt(roundings);
  return tolerance_safety * sigma;
}

double mixed_tolerance(double f32_roundings, int64_t bf16_roundings) {
  const double narrow = epsilon_of(DType::bf16), wide = epsilon_of(DType::f32);
  return tolerance_safety / 6 *
         std::sqrt(wide * wide * f32_roundings + narrow * narrow * bf16_roundings);
}

double error_scale(std::span<const double> row, double size) {
  constexpr double smallest = 0x1p-80;
  double sum = 0;
  for (const double x : row) sum += x * x;
  const double rms = row.empty() ? 0 : std::sqrt(sum / row.size());
  return std::max({smallest, size, rms});
}

}  // namespace gyre
