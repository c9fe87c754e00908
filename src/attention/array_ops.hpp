#pragma once
// Operations of the executor on plan arrays outside the block kernel, besides copies of rows
// (runtime/row_copy.hpp). Memory bandwidth is the limit: a device should take bytes / bandwidth.
//
//     fill                  initialise log-sum-exps of cleared arrays
//     merge_statistics      L <- max(L, L_i) + log(1 + exp(min(L, L_i) - max(L, L_i)))
//     rescale_output        O <- O · exp(L_0 - L)           L_0: log-sum-exps of O so far
//     add_output            O <- O + O_i · exp(L_i - L)
//     take_in_sinks         O, L <- O · exp(L - L'), L'         L' = log(exp L + exp z)
//     row_deltas            delta_i <- <O_i, dO_i>
//     sum_over_heads        x_0 <- Σ_h x_h, others <- 0     x_h: the last elements of head h
//     add_sink_gradient     dz <- dz - sum_i exp(z - L_i) · delta_i
//
// Arrays lie in the memory space of the stream, to which the operations are submitted in order; a
// device in a build without CUDA is a runtime error. Host and device take in sinks by the same
// arithmetic. Sums over rows and heads are in f64; each has its own fixed order of summation.

#include <cmath>
#include <limits>

#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Effect of a sink of logit `sink` on a row: the new log-sum-exp, and the factor of its output.
/// Precondition: lse > -inf; callers leave rows without visible keys (padding) unchanged.
struct SinkWeights {
  float lse, keep;
};
GYRE_HOST_DEVICE inline SinkWeights take_in_sink(float lse, float sink) {
  const float top = lse < sink ? sink : lse, low = lse < sink ? lse : sink;
  const float after = top + std::log1p(std::exp(low - top));
  return {after, std::exp(lse - after)};
}
/// Term that a row subtracts from the gradient of a sink: exp(z - L) · delta, where L includes the
/// sink; 0 for a row without visible keys.
GYRE_HOST_DEVICE inline double sink_gradient_term(float sink, float lse, float delta) {
  if (lse == -std::numeric_limits<float>::infinity()) return 0;
  return std::exp(sink - static_cast<double>(lse)) * delta;
}

void fill(MatrixView<float> to, float value, Stream& stream);

/// lse, partial [rows, heads]: log-sum-exps over different keys; -inf over none.
void merge_statistics(MatrixView<float> lse, MatrixView<const float> partial, Stream& stream);

/// Output over some keys, out [rows, heads · dim], and its log-sum-exps, lse [rows, heads].
struct Partial {
  MatrixRef out;
  MatrixView<const float> lse;
};
// Merges outputs, after their log-sum-exps: `lse` of `to` is over the keys of all. The weight of a
// row over no keys is 0.
/// `before` [rows, heads]: log-sum-exps over the keys of to.out alone.
void rescale_output(const Partial& to, MatrixView<const float> before, Stream& stream);
/// The outputs have one type, to which the sum is rounded.
void add_output(const Partial& to, const Partial& part, Stream& stream);

/// out [rows, heads · dim], lse [rows, heads], sinks [heads].
void take_in_sinks(const MatrixRef& out, MatrixView<float> lse, const float* sinks, Stream& stream);

/// out, d_out [rows, heads · dim], delta [rows, heads].
void row_deltas(const ConstMatrixRef& out, const ConstMatrixRef& d_out, MatrixView<float> delta,
                Stream& stream);

/// heads [rows, heads · dim]; the part is the last `part` elements of each head.
void sum_over_heads(MatrixView<float> heads, int64_t dim, int64_t part, Stream& stream);

/// Gradients of sinks. Successive calls on a device share memory for partial sums.
class SinkGradients {
 public:
  /// lse, delta [rows, heads], sinks and d_sinks [heads].
  void add(MatrixView<const float> lse, MatrixView<const float> delta, const float* sinks,
           double* d_sinks, Stream& stream);

 private:
  Buffer<double> parts_;
};

}  // namespace gyre
