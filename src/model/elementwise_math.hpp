#pragma once
// Scalar arithmetic of the decoder's row operations, used by kernels. The host's vector version is
// in elementwise.cpp; both follow the definitions in elementwise.hpp.

#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/host_device.hpp"

namespace gyre {

/// Factor for a row of x, from its sum of squares: 1 / sqrt(mean(x²) + eps).
GYRE_HOST_DEVICE inline float rms_scale(float sum_of_squares, int64_t columns, float eps) {
  return 1.0F / std::sqrt(sum_of_squares / static_cast<float>(columns) + eps);
}

/// silu(gate) · up. With e = exp(-|g|) nothing overflows: 1 / (1 + e^-g) is 1 / (1 + e) for g >= 0
/// and e / (1 + e) for g < 0.
GYRE_HOST_DEVICE inline float silu_product(float gate, float up) {
  const float e = std::exp(-std::fabs(gate));
  return gate * ((gate < 0 ? e : 1.0F) / (1.0F + e)) * up;
}

inline constexpr double full_turn = 2 * std::numbers::pi;

/// Full turns by which a pair of this frequency rotates per position.
inline double rope_turns(double frequency) {
  return frequency / full_turn;
}

struct Rotation {
  float cos, sin;
  GYRE_HOST_DEVICE float low(float a, float b) const { return a * cos - b * sin; }
  GYRE_HOST_DEVICE float high(float a, float b) const { return b * cos + a * sin; }
};

/// Rotation of a pair at a position, times `scale`. An angle p · frequency in f32 has a relative
/// error of 2^-24, which is 0.008 at position 128 K. So whole turns are subtracted in f64, where
/// that is exact, and the remainder, at most half a turn, is rounded to f32. The error is 2^-23 at
/// any position, for one f64 product per pair and position.
GYRE_HOST_DEVICE inline Rotation rope_rotation(int64_t position, double turns_each, float scale) {
  const double turns = position * turns_each;
  const auto angle = static_cast<float>((turns - std::rint(turns)) * full_turn);
  return {scale * std::cos(angle), scale * std::sin(angle)};
}

}  // namespace gyre
