#pragma once
// The causal depthwise convolution before a recurrence: its kernels, for the parts of a rank.
//
//     z_t = Σ_j weight_j x_{t-w+1+j}          of each channel, j = 0 ... w-1; x = 0 before a document
//     s   = z / (1 + e^-z)                    SiLU
//     y   = s / sqrt(Σ s² + 1e-6)             a head of queries or keys; of values, y = s
//
// x are queries, keys and values as projections return them, y what the recurrence reads. Products,
// y and gradients of y are f32, whatever the type of x: y is not rounded to that type.
//
// The first tokens of a part read tokens of earlier parts, its history (halo.hpp). Backward:
//
//     ds = (dy - y <y, dy>) / sqrt(...)       of values, ds = dy
//     dz = ds · dSiLU/dz
//     dweight_j = Σ_t dz_t x_{t-w+1+j}        sums of 64 tokens in f32, their sum in double
//     dx_t = Σ_m weight_{w-1-m} dz_{t+m}      of own tokens t + m: the gradients of the history go
//                                             to the parts that it came from, which add them

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "core/matrix_ref.hpp"
#include "core/pass.hpp"
#include "recurrence/kind.hpp"

namespace gyre {

/// Added to the sum of squares of a head.
inline constexpr double convolution_epsilon = 1e-6;

/// Arrays that are convolved, in the order of channels.
inline constexpr std::array convolved_arrays = {RecurrenceArray::q, RecurrenceArray::k,
                                                RecurrenceArray::v};
/// Rows of queries, keys and values.
using ConvolutionRows = std::array<MatrixRef, 3>;
/// First channel of convolved array `index`.
int64_t first_channel(const RecurrenceShape& shape, size_t index);
inline bool is_normalised(size_t index) {
  return convolved_arrays[index] != RecurrenceArray::v;
}

/// The rows of a part.
struct ConvolutionPart {
  ConvolutionRows x, d_x;     ///< [tokens], of the type of activations
  ConvolutionRows y;          ///< [tokens], f32
  ConvolutionRows d_y;        ///< [tokens], f32: gradient of y; from slopes() on, of z
  ConvolutionRows history;    ///< [tokens before it, at most width - 1] of x
  ConvolutionRows d_history;  ///< f32
  ConvolutionRows added;  ///< [at most width - 1], f32: gradients of its last rows, by later parts
};

/// Rows are in the memory of the kernel's stream, to which calls are submitted in order.
class ConvolutionKernel {
 public:
  ConvolutionKernel() = default;
  virtual ~ConvolutionKernel() = default;
  ConvolutionKernel(const ConvolutionKernel&) = delete;
  ConvolutionKernel& operator=(const ConvolutionKernel&) = delete;

  /// weights: [channels, width], in host memory
  virtual void set_weights(std::span<const float> weights) = 0;
  /// Writes y.
  virtual void forward(const ConvolutionPart& part) = 0;
  /// Replaces d_y by the gradient of z, writes d_history, and adds to the gradient of the weights.
  virtual void slopes(const ConvolutionPart& part) = 0;
  /// Writes d_x. After slopes().
  virtual void backward(const ConvolutionPart& part) = 0;

  virtual void clear_weight_gradients() = 0;
  /// to: [channels, width], in the memory of the stream, of channels from `first` on
  virtual void weight_gradients(int64_t first, std::span<float> to) = 0;
};

class CpuConvolutionKernel final : public ConvolutionKernel {
 public:
  CpuConvolutionKernel(const RecurrenceShape& shape, int threads);

  void set_weights(std::span<const float> weights) override;
  void forward(const ConvolutionPart& part) override;
  void slopes(const ConvolutionPart& part) override;
  void backward(const ConvolutionPart& part) override;
  void clear_weight_gradients() override;
  void weight_gradients(int64_t first, std::span<float> to) override;

 private:
  /// A head of one array: the columns of its rows, and its channels.
  struct Head {
    size_t array;
    int64_t column, dim, channel;
  };
  struct Scratch {
    std::vector<float> rows;          ///< of x, or of dz: [width - 1 + chunk, dim]
    std::vector<float> value, slope;  // [dim]
    std::vector<float> sums;          // [width, dim]
  };
  template <class Body>
  void for_each_head(Body body);
  /// Calls body(first row, rows) for each chunk of x, whose rows and the width - 1 before them are
  /// in the scratch.
  template <class Body>
  void for_each_chunk(const ConvolutionPart& part, const Head& head, Scratch& scratch, Body body);
  void history_gradients(const ConvolutionPart& part, const Head& head, Scratch& scratch);
  const float* tap(int64_t j, const Head& head) const {
    return taps_.data() + j * shape_.channels() + head.channel;
  }

  RecurrenceShape shape_;
  int64_t width_;
  int threads_;
  std::vector<float> taps_;     // [width, channels]
  std::vector<double> d_taps_;  // [width, channels]
  std::vector<Scratch> scratch_;
};

/// FLOPs of a pass: two for each element of each product with a weight; backward those of dx and of
/// dweight.
double convolution_flops(Pass pass, int64_t tokens, const RecurrenceShape& shape);

}  // namespace gyre
