#pragma once
// What the executor does to the elements of plan arrays outside the block kernel, on the host and
// on a device. All of it is bound by memory: a device should take bytes / bandwidth.
//
//     copy                  pack, unpack and add what travels; copies from a rank to itself
//     fill                  log-sum-exps of cleared arrays
//     take_in_sinks         O, L <- O · exp(L - L'), L'         L' = log(exp L + exp z)
//     delta                 delta_i <- <O_i, dO_i>
//     add_sink_gradient     dz <- dz - sum_i exp(z - L_i) · delta_i
//
// Both implementations copy, add and take in sinks by the same arithmetic, element by element; sums
// over rows and heads are kept in f64, in an order of their own that no run changes.

#include <cmath>
#include <limits>
#include <memory>
#include <span>

#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// The rows of an array, or of some of its heads, in memory: row r of plane p begins at element
/// r · row + p · plane of `data`.
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

/// x as a To: bf16 is rounded to nearest.
template <class To, class From>
GYRE_HOST_DEVICE constexpr To converted(From x) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else if constexpr (std::is_same_v<To, float>)
    return to_float(x);
  else
    return to_bf16(to_float(x));
}

/// How a sink of logit `sink` changes a row: its log-sum-exp, and the factor of its output. Not for
/// rows that saw nothing (lse = -inf), which stay as they are: padding.
struct SinkWeights {
  float lse, keep;
};
GYRE_HOST_DEVICE inline SinkWeights take_in_sink(float lse, float sink) {
  const float top = lse < sink ? sink : lse, low = lse < sink ? lse : sink;
  const float after = top + std::log1p(std::exp(low - top));
  return {after, std::exp(lse - after)};
}
/// What a row takes off the gradient of a sink: exp(z - L) · delta, L with the sink in it; 0 for a
/// row that saw nothing.
GYRE_HOST_DEVICE inline double sink_gradient_term(float sink, float lse, float delta) {
  if (lse == -std::numeric_limits<float>::infinity()) return 0;
  return std::exp(static_cast<double>(sink) - static_cast<double>(lse)) *
         static_cast<double>(delta);
}

/// Arrays are in the space of the stream that the implementation was made for. All operations are
/// submitted to that stream, in order.
class ArrayOps {
 public:
  virtual ~ArrayOps() = default;
  /// Performs the copies as if one after the other: two may add to the same elements. No copy reads
  /// what another one writes.
  virtual void copy(std::span<const RowCopy> copies) = 0;
  virtual void fill(MatrixView<float> to, float value) = 0;
  /// out [rows, heads · dim], lse [rows, heads], sinks [heads].
  virtual void take_in_sinks(const MatrixRef& out, MatrixView<float> lse, const float* sinks) = 0;
  /// out, d_out [rows, heads · dim], delta [rows, heads].
  virtual void delta(const ConstMatrixRef& out, const ConstMatrixRef& d_out,
                     MatrixView<float> delta) = 0;
  /// lse, delta [rows, heads], sinks and d_sinks [heads].
  virtual void add_sink_gradient(MatrixView<const float> lse, MatrixView<const float> delta,
                                 const float* sinks, double* d_sinks) = 0;
};

std::unique_ptr<ArrayOps> make_host_array_ops();
/// Kernels on a stream made by make_cuda_stream, which must outlive them. Throws a runtime error in
/// a build without CUDA.
std::unique_ptr<ArrayOps> make_cuda_array_ops(Stream& stream);
/// Those of the stream's space.
std::unique_ptr<ArrayOps> make_array_ops(Stream& stream);

/// A matrix of the stream's space as the host can read it, after all work submitted so far: itself
/// on the host, a copy that was waited for on a device.
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

/// A whole matrix (cols = stride) of the stream's space as the host can fill it in: itself on the
/// host; on a device a matrix of its own, of which every element is to be written before upload().
class HostFill {
 public:
  HostFill(const MatrixRef& to, Stream& stream);
  const MatrixRef& matrix() const { return matrix_; }
  /// Waits until everything is there.
  void upload();

 private:
  MatrixRef to_;
  Stream& stream_;
  Buffer<std::byte> staging_;
  MatrixRef matrix_;
};

}  // namespace gyre
