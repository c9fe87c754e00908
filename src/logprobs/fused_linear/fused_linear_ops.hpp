#pragma once
// Operations of the fused linear layer on host or device: products of a tile, and moves of rows.
// Row passes are those of row_kernels.hpp.

#include <memory>
#include <span>

#include "core/matrix_ref.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Some rows of X, their logits in some columns (a tile), and the gradient of the tile.
class LinearTile {
 public:
  virtual ~LinearTile() = default;
  /// Sets the rows to those of x [.., D], f32 or bf16, from `first` on. They must not change while
  /// the tile uses them.
  virtual void load(ConstMatrixRef x, int64_t first, int64_t rows) = 0;
  /// Sets the rows to rows numbers[0 .. rows) of x; `numbers` is a result of LinearOps::upload.
  virtual void load_listed(ConstMatrixRef x, const int32_t* numbers, int64_t rows) = 0;
  /// Returns [rows, columns] <- rows · weightᵀ for these rows of the weight [columns, D].
  virtual MatrixView<float> logits(ConstMatrixRef weight) = 0;
  /// Returns the matrix for the gradient of those logits: [rows, columns], possibly in their
  /// memory. bf16 on a device if X and the weight are bf16, for the tensor cores.
  virtual MatrixRef gradient() = 0;
  /// d_x [rows, D] <- or += gradient · weight of the last logits()
  virtual void add_d_x(MatrixView<float> d_x, bool accumulate) = 0;
  /// d_weight [columns, D] += gradientᵀ · rows
  virtual void add_d_weight(MatrixView<float> d_weight) = 0;
};

struct TileSize {
  int64_t rows = 0, columns = 0;
};
/// Default size of a tile in memory of `space`.
TileSize usual_tile(MemorySpace space);

/// Operations on matrices in memory of space(), submitted in order to one stream.
class LinearOps {
 public:
  virtual ~LinearOps() = default;
  virtual MemorySpace space() const = 0;
  virtual RowKernels& row_kernels() = 0;
  /// Creates a tile of at most this size for rows of type `x` and a weight of type `weight`.
  virtual std::unique_ptr<LinearTile> make_tile(TileSize most, int64_t hidden, DType x,
                                                DType weight, int threads) = 0;

  /// Returns a copy in space(), complete on return.
  virtual Buffer<int32_t> upload(std::span<const int32_t> numbers) = 0;
  /// to <- from, of equal shape and type.
  virtual void copy(ConstMatrixRef from, MatrixRef to) = 0;
  /// Row numbers[r] of `to` <- row r of `from`.
  virtual void scatter(MatrixView<const float> from, const int32_t* numbers,
                       MatrixView<float> to) = 0;
  virtual void add(MatrixView<const float> from, MatrixView<float> to) = 0;
  virtual void fill_zero(MatrixView<float> to) = 0;
  /// z <- cap · tanh(z / cap)
  virtual void soft_cap(MatrixView<float> z, float cap) = 0;
};

/// Operations on host memory; stateless.
LinearOps& cpu_linear_ops();

/// Creates operations in the stream's memory space, with row passes by `kernels` on the same
/// stream. Both must outlive them.
std::unique_ptr<LinearOps> make_linear_ops(Stream& stream, RowKernels& kernels);

}  // namespace gyre
