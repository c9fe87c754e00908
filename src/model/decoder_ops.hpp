#pragma once
// Operations of a decoder on rows of activations, on the host and on a device.
//
//     embed           x <- rows of the embedding, those of this rank's part of the vocabulary
//     add_rms_norm    x <- x + y;  h <- rms_norm(x) · weight   one pass over the row
//     linear          y <- x · w
//     add_bias        x <- x + bias                    one pass
//     head_norm       x <- rms_norm(x) · weight        of each head, one pass
//     rope            q, k rotated in place            one pass, angles once for all heads
//     gate_multiply   gate <- activation(gate) · up    one pass
//
// Matrices are f32 or bf16; arithmetic is f32, and each result is rounded once to the type of its
// matrix. Additions and conversions are copies of rows (runtime/row_copy.hpp). For the others the
// host uses elementwise.hpp and gemm.hpp on blocks of rows that are widened to f32; a device uses
// cuda_decoder_ops.cu and cuda_gemm.hpp. All but linear are bound by memory bandwidth.
// Elements read and written per element: add_rms_norm 4 (2 without y), gate_multiply and add 3,
// add_bias, head_norm, rope, embed and convert 2.

#include <cstdint>
#include <memory>
#include <span>

#include "core/matrix_ref.hpp"
#include "core/model_config.hpp"
#include "model/rotary.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Matrices, norm weights and biases are in the memory space of the stream that the operations were
/// made for. All operations are submitted to that stream, in order.
class DecoderOps {
 public:
  explicit DecoderOps(Stream& stream) : stream_(stream) {}
  virtual ~DecoderOps() = default;

  /// Sets tokens [slots] and positions [slots] for the operations that follow. Both are in host
  /// memory and must stay unchanged until the stream is synchronised.
  virtual void set_slots(std::span<const int32_t> tokens, std::span<const int32_t> positions) = 0;

  /// out [slots, hidden] <- rows `token - first` of table [rows, hidden]; 0 for tokens outside.
  virtual void embed(ConstMatrixRef table, int64_t first, MatrixRef out) = 0;
  /// x += y, unless y is empty (data == nullptr); h_i = x_i / sqrt(mean(x²) + eps) · weight, of x
  /// as it is stored. All [slots, hidden], weight [hidden]; h has the type of y.
  virtual void add_rms_norm(MatrixRef x, ConstMatrixRef y, const float* weight, float eps,
                            MatrixRef h) = 0;
  /// x += y
  void add(MatrixRef x, ConstMatrixRef y);
  /// to <- from, rounded or widened.
  void convert(ConstMatrixRef from, MatrixRef to);
  /// y [slots, n] <- x [slots, k] · w [k, n]; x and w have the same type, y has it or is f32.
  virtual void linear(ConstMatrixRef x, ConstMatrixRef w, MatrixRef y) = 0;
  /// x [slots, columns] += bias [columns]
  void add_bias(MatrixRef x, const float* bias);
  /// RMS norm of each head of x [slots, heads · head_dim], in place; weight [head_dim].
  virtual void head_norm(MatrixRef x, int64_t head_dim, const float* weight, float eps) = 0;
  /// Rotates q [slots, heads · head_dim] and k [slots, kv_heads · head_dim], of the same type, in
  /// place by the positions of the slots; see apply_rope.
  virtual void rope(MatrixRef q, MatrixRef k, int64_t head_dim, const Rotary& rotary) = 0;
  /// gate <- activation(gate) · up, both [slots, columns] of the same type.
  virtual void gate_multiply(MatrixRef gate, ConstMatrixRef up, GateActivation activation) = 0;

 protected:
  Stream& stream_;
};

/// Operations for the stream's memory space. The stream must outlive them.
std::unique_ptr<DecoderOps> make_decoder_ops(Stream& stream);

}  // namespace gyre
