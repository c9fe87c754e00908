#pragma once
// What is around a library's attention over a ragged batch on the device: its results, in scratch
// rows (see ragged_batch.hpp), folded into the running ones, results set to nothing, and what it is
// given in the place of O. Limit: the bytes of the rows over the memory bandwidth; a forward merge
// of bf16 into f32 moves 6 bytes an element where nothing was there before, 10 elsewhere.

#include "attention/kernels/ragged_batch.hpp"
#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// A Round in device memory; `longest` is its longest piece. Without pieces: the one of rows
/// [0, longest).
struct DeviceRound {
  const RowPiece* pieces = nullptr;
  int64_t count = 0;
  int64_t longest = 0;
};

/// Libraries take O, from which they make delta = <O, dO>, where BackwardBlock has delta alone. Any
/// O' with <O', dO> = delta serves as well, and the shortest is O' = dO · delta / |dO|^2: no longer
/// than O is, and, as all terms of <O', dO> have one sign, good to the last bit of its type. This
/// is its factor, 0 where dO is 0 (and delta therefore, too).
GYRE_HOST_DEVICE inline double stand_in_factor(double delta, double d_out_squared) {
  return d_out_squared > 0 ? delta / d_out_squared : 0;
}
/// The log-sum-exp with which p = exp(x - LSE) is 0 for a row that saw nothing, whatever x is.
GYRE_HOST_DEVICE inline float lse_for_backward(float lse) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  return lse == -infinity ? infinity : lse;
}

/// How scratch rows and the rows that they belong to combine: what was there is taken in, or not
/// even read.
enum class Fold { add, replace };

/// Merges (merge.hpp) the scratch rows of (partial [scratch rows, heads · head_dim],
/// partial_lse [scratch rows, heads]) into the rows of (out, lse), both f32 or bf16. Rows of `out`
/// whose lse is -inf, or all with Fold::replace, are not read.
void cuda_merge_rows(const DeviceRound& round, ConstMatrixRef partial,
                     MatrixView<const float> partial_lse, MatrixRef out, MatrixView<float> lse,
                     Fold fold, Stream& stream);

/// Fills the scratch rows of what a backward pass reads of the rows of d_out, lse and delta:
/// stand_in [scratch rows, heads · head_dim] (see stand_in_factor), of the type of d_out, and
/// scratch_lse [scratch rows, heads].
void cuda_stand_in_rows(const DeviceRound& round, ConstMatrixRef d_out, MatrixView<const float> lse,
                        MatrixView<const float> delta, MatrixRef stand_in,
                        MatrixView<float> scratch_lse, Stream& stream);

/// Adds the scratch rows of `partial` to the rows of `sum`, or puts them in their place: f32 or
/// bf16 each, as many columns.
void cuda_add_rows(const DeviceRound& round, ConstMatrixRef partial, MatrixRef sum, Fold fold,
                   Stream& stream);

/// The log-sum-exps of an even batch for a backward pass (lse_for_backward), head by head:
/// to [entries, heads, rows] from the rows [first + entry · distance, ... + rows) of lse.
void cuda_pack_lse(MatrixView<const float> lse, int64_t first, int64_t distance, int64_t entries,
                   int64_t rows, float* to, Stream& stream);

/// Sets the rows of `m`, f32 or bf16, to a value.
void cuda_fill_rows(const DeviceRound& round, MatrixRef m, float value, Stream& stream);

}  // namespace gyre
