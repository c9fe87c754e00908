#pragma once
// Elementwise operations of the executor on plan arrays outside the block kernel, on the host and
// on a device. Memory bandwidth is the limit: a device should take bytes / bandwidth.
//
//     copy                  pack, unpack and add messages; copy from a rank to itself
//     fill                  initialise log-sum-exps of cleared arrays
//     take_in_sinks         O, L <- O · exp(L - L'), L'         L' = log(exp L + exp z)
//     delta                 delta_i <- <O_i, dO_i>
//     sum_over_heads        x_0 <- Σ_h x_h, others <- 0     x_h: the last elements of head h
//     add_sink_gradient     dz <- dz - sum_i exp(z - L_i) · delta_i
//
// Both implementations copy, add and take in sinks by the same arithmetic, element by element. Sums
// over rows and heads are in f64; each implementation has its own fixed order of summation.

#include <cmath>
#include <limits>
#include <memory>
#include <span>

#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Memory layout of the rows of an array or of some of its heads: row r of plane p begins at
/// element r · row + p · plane of `data`.
struct RowPlace {
  std::byte* data = nullptr;
  DType type = DType::f32;  ///< f32 or bf16
  int64_t row = 0, plane = 0;
};

/// Copies `rows` rows of `planes` times `width` elements. Elements are rounded to `via`, the type
/// of messages, then to the type of `to`; with `add`, they are added in f32 to the destination.
struct RowCopy {
  int64_t rows = 0, planes = 1, width = 0;
  RowPlace from, to;
  DType via = DType::f32;
  bool add = false;
};

/// Converts x to To; bf16 is rounded to nearest.
template <class To, class From>
GYRE_HOST_DEVICE constexpr To converted(From x) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else if constexpr (std::is_same_v<To, float>)
    return to_float(x);
  else
    return to_bf16(to_float(x));
}

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

/// x[0] <- sum of the elements x[0], x[stride], x[2 stride], ... before x[end]; the others <- 0.
GYRE_HOST_DEVICE inline void sum_elements(float* x, int64_t end, int64_t stride) {
  double sum = 0;
  for (int64_t at = 0; at < end; at += stride) {
    sum += x[at];
    x[at] = 0;
  }
  x[0] = static_cast<float>(sum);
}

/// Arrays lie in the memory space of the implementation's stream. All operations are submitted to
/// that stream, in order.
class ArrayOps {
 public:
  virtual ~ArrayOps() = default;
  /// Performs the copies as if sequentially: several may add to the same elements. No copy may read
  /// what another one writes.
  virtual void copy(std::span<const RowCopy> copies) = 0;
  virtual void fill(MatrixView<float> to, float value) = 0;
  /// out [rows, heads · dim], lse [rows, heads], sinks [heads].
  virtual void take_in_sinks(const MatrixRef& out, MatrixView<float> lse, const float* sinks) = 0;
  /// out, d_out [rows, heads · dim], delta [rows, heads].
  virtual void delta(const ConstMatrixRef& out, const ConstMatrixRef& d_out,
                     MatrixView<float> delta) = 0;
  /// heads [rows, heads · dim]; the part is the last `part` elements of each head.
  virtual void sum_over_heads(MatrixView<float> heads, int64_t dim, int64_t part) = 0;
  /// lse, delta [rows, heads], sinks and d_sinks [heads].
  virtual void add_sink_gradient(MatrixView<const float> lse, MatrixView<const float> delta,
                                 const float* sinks, double* d_sinks) = 0;
};

std::unique_ptr<ArrayOps> make_host_array_ops();
/// Operations on `stream`, which make_cuda_stream made and which must outlive them. Throws a
/// runtime error in a build without CUDA.
std::unique_ptr<ArrayOps> make_cuda_array_ops(Stream& stream);
/// The implementation for the stream's memory space.
std::unique_ptr<ArrayOps> make_array_ops(Stream& stream);

/// Host view of a matrix in the stream's space, after all work submitted so far: the matrix itself
/// on the host; on a device a copy, complete when constructed.
class HostCopy {
 public:
  HostCopy() = default;
  HostCopy(const ConstMatrixRef& from, Stream& stream);
  const ConstMatrixRef& matrix() const { return matrix_; }
  float at(int64_t row, int64_t col) const { return matrix_.at(row, col); }

 private:
  Buffer<std::byte> copy_;
  ConstMatrixRef matrix_;
};

/// Host buffer for filling a whole matrix (cols = stride) in the stream's space: the matrix itself
/// on the host; on a device a separate matrix whose elements must all be written before upload().
class HostFill {
 public:
  HostFill(const MatrixRef& to, Stream& stream);
  const MatrixRef& matrix() const { return matrix_; }
  /// Copies the buffer to the matrix and waits for completion.
  void upload();

 private:
  MatrixRef to_;
  Stream& stream_;
  Buffer<std::byte> staging_;
  MatrixRef matrix_;
};

}  // namespace gyre
