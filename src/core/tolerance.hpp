#pragma once
// The error model that all tolerances follow from. The tolerances themselves stand beside what they
// are of: attention/tolerance.hpp, logprobs/tolerance.hpp, model/tolerance.hpp.
//
// Model. The error of one rounding is uniform in [-eps/2, eps/2]: its standard deviation is
// eps/sqrt(12). Roundings go up as often as down. So n of them add up like a random walk, as
// sqrt(n), not as n, the worst case, which never happens. The partial sums that are rounded grow
// towards the result, which divides the error by another sqrt(3). After n roundings, the error of a
// result, relative to its size, has the standard deviation
//
//     sigma = eps / 6 · sqrt(n)
//
// n is the sum of the lengths of all reductions between the inputs and the result (a dot product of
// length k rounds k times), plus four for every merge of partial attention results, plus one. A
// tolerance bounds the largest error of millions of values, which is five or six sigma. A softmax
// over large scores also amplifies the error of its input. The factor `safety` allows for both:
//
//     tolerance = safety · sigma          safety = 32
//
// Measured errors, as shares of these tolerances, are 0.05 to 0.12 for hidden states of decoders of
// 2 to 24 layers and up to 2048 tokens in f32 against f64, with random weights of the usual size
// (1/sqrt(fan-in)), up to 0.7 with weights 1.5 to 3 times larger, and 0.1 to 0.3 for trained
// models. Eight layers of weights twice as large, where attention is a near-argmax and every layer
// amplifies the error of the previous one, reach 1.2: --tol-scale exists for such models. For
// comparison, leaving out one key of every block gives errors of 2 and more, where tolerances are
// 1e-5 to 1e-4.
//
// Errors are relative to the rms of the value's row in the reference, never to the value itself,
// which may be zero by cancellation.

#include <cstdint>
#include <span>

#include "core/dtype.hpp"

namespace gyre {

inline constexpr double tolerance_safety = 32;
inline constexpr int64_t roundings_per_merge = 4;

/// Distance from 1 to the next larger number; 0 for integers, which are exact.
double epsilon_of(DType type);

// Storing a result in bf16 rounds it once, by at most half of the distance to the next number: 2^-8
// of its value. That bounds every element, so that it is not a part of the random walk. The
// tolerance of such a value is tolerance · scale + 2^-8 |value|.

/// Returns what storing in `stored` adds to the scale of an error, as a factor of the value: 2^-8 /
/// tolerance for bf16, 0 for f32.
double storage_scale(DType stored, double tolerance);

// These limits bound what errors have in common. The tolerance of one value allows for the largest
// of millions of random errors. In bf16, that is several percent, and a wrong factor or offset of
// all values is below it. But random errors cancel: of n errors with the standard deviation sigma,
// the rms is sigma, and their mean is about sigma / sqrt(n). So every check of bf16 results also
// bounds
//
//     the rms of all errors                2 sigma (1 + 2 / sqrt(n))
//     the mean of all errors               sigma (0.3 + 4 / sqrt(n))
//     the factor of all values, minus 1    the same, over the rms of the references
//
// where sigma is the standard deviation of an error, without a safety factor. The factor is
// that of the least squares: 1 + Σ error · reference / Σ reference². The second terms are for few
// values, of which one may be large. Mean and factor have 0.3 sigma beside their random part,
// because errors are not quite independent: all outputs of a layer share its rounded inputs.

/// Standard deviation of one rounding to bf16, relative to the value, in units of epsilon:
/// sqrt(1/12) times the rms of 1/m for mantissas m whose logarithms are uniform,
/// sqrt(3 / (8 ln 2)). Partial sums do not grow: each partial result is rounded once, at the size
/// of the result.
inline constexpr double narrow_deviation = 0.2123;

struct CommonErrors {
  double rms = 0, mean = 0, factor = 0;
};
/// Bounds for `values` errors, relative to references whose squares have the sum `squares`.
CommonErrors common_error_limits(double sigma, double values, double squares);

/// safety · eps / 6 · sqrt(roundings), by the model above.
double tolerance_for(DType type, int64_t roundings);

/// The same for two types: safety / 6 · sqrt(eps_f32² f32_roundings + eps_bf16² bf16_roundings).
double mixed_tolerance(double f32_roundings, int64_t bf16_roundings);

/// The scale of errors in a row of one head: the larger of its rms and `size`, at least 2^-80. A
/// weight below 2^-126 is 0 in f32. A row may therefore vanish in f32 but not in f64, where it is a
/// sum of up to 2^20 terms of at most 2^-120; such a row is within a tolerance of 2^-20.
double error_scale(std::span<const double> row, double size);

}  // namespace gyre
