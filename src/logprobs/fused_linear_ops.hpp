#pragma once
// What the fused linear layer computes with, on the host or on a device: products of a tile, and
// moves of rows. Its row passes are those of row_kernels.hpp.

#include <memory>
#include <span>

#include "core/matrix_ref.hpp"
#include "logprobs/row_kernels.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Rows of X, the tile of their logits in some columns, and the gradient of that.
class LinearTile {
 public:
  virtual ~LinearTile() = default;
  /// The rows are those of x [.., D], f32 or bf16, from `first` on, which must stay as they are
  /// while the tile has them.
  virtual void load(ConstMatrixRef x, int64_t first, int64_t rows) = 0;
  /// The rows are numbers[0 .. rows) of x; numbers as LinearOps::upload returns them.
  virtual void load_listed(ConstMatrixRef x, const int32_t* numbers, int64_t rows) = 0;
  /// [rows, columns] <- rows · weightᵀ, of these rows of the weight [columns, D].
  virtual MatrixView<float> logits(ConstMatrixRef weight) = 0;
  /// Where the gradient of those logits goes: [rows, columns], maybe their memory. In bf16 on a
  /// device where X and the weight are, for the sake of its matrix units.
  virtual MatrixRef gradient() = 0;
  /// d_x [rows, D] <- or += gradient · that weight
  virtual void add_d_x(MatrixView<float> d_x, bool accumulate) = 0;
  /// d_weight [columns, D] += gradientᵀ · rows
  virtual void add_d_weight(MatrixView<float> d_weight) = 0;
};

struct TileSize {
  int64_t rows = 0, columns = 0;
};

/// Matrices lie in the memory of space(), and are read and written in the order of its stream.
class LinearOps {
 public:
  virtual ~LinearOps() = default;
  virtual MemorySpace space() const = 0;
  virtual RowKernels& row_kernels() = 0;
  /// Where the caller leaves it open.
  virtual TileSize usual_tile() const = 0;
  /// Types of elements: of the rows that it will be given, and of weights.
  virtual std::unique_ptr<LinearTile> make_tile(TileSize most, int64_t hidden, DType x,
                                                DType weight, int threads) = 0;

  /// A copy in space(), complete on return.
  virtual Buffer<int32_t> upload(std::span<const int32_t> numbers) = 0;
  /// to <- from, of one shape and type.
  virtual void copy(ConstMatrixRef from, MatrixRef to) = 0;
  /// Row numbers[r] of `to` <- row r of `from`.
  virtual void scatter(MatrixView<const float> from, const int32_t* numbers,
                       MatrixView<float> to) = 0;
  virtual void add(MatrixView<const float> from, MatrixView<float> to) = 0;
  virtual void fill_zero(MatrixView<float> to) = 0;
};

/// The host's; no state.
LinearOps& cpu_linear_ops();

/// Those of the stream's space, with row passes by `kernels`, which are of the same stream. Both
/// must outlive them.
std::unique_ptr<LinearOps> make_linear_ops(Stream& stream, RowKernels& kernels);

}  // namespace gyre
