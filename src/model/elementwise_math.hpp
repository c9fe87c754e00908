#pragma once
// Scalar arithmetic of the decoder's row operations, used by kernels. The host's vector version is
// in elementwise.cpp; both follow the definitions in elementwise.hpp.

#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/host_device.hpp"
#include "core/model_config.hpp"

namespace gyre {

/// Factor for a row of x, from its sum of squares: 1 / sqrt(mean(x²) + eps).
GYRE_HOST_DEVICE inline float rms_scale(float sum_of_squares, int64_t columns, float eps) {
  return 1.0F / std::sqrt(sum_of_squares / static_cast<float>(columns) + eps);
}

/// gelu_tanh(x) = x · sigmoid(s), because (1 + tanh(s/2)) / 2 = sigmoid(s), with s = x · (first +
/// third · x²).
inline constexpr float gelu_tanh_first = 1.5957691216F;  // 2·√(2/π)
inline constexpr float gelu_tanh_third = 0.0713548163F;  // 0.044715 of that

/// x · sigmoid(s). With e = exp(-|s|) nothing overflows: sigmoid(s) is 1 / (1 + e) for s >= 0 and
/// e / (1 + e) for s < 0.
GYRE_HOST_DEVICE inline float times_sigmoid(float x, float s) {
  const float e = std::exp(-std::fabs(s));
  return x * ((s < 0 ? e : 1.0F) / (1.0F + e));
}

/// The activation's value. gelu has the relative accuracy of erfc, also for large negative x.
template <GateActivation activation>
GYRE_HOST_DEVICE inline float activated(float x) {
  if constexpr (activation == GateActivation::silu) {
    return times_sigmoid(x, x);
  } else if constexpr (activation == GateActivation::sigmoid) {
    return times_sigmoid(1.0F, x);
  } else if constexpr (activation == GateActivation::gelu_tanh) {
    return times_sigmoid(x, x * (gelu_tanh_first + gelu_tanh_third * x * x));
  } else {
    constexpr float sqrt_half = 0.70710678F;
    return 0.5F * x * std::erfc(-sqrt_half * x);
  }
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
