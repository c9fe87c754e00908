#pragma once
// Device operations around a library's attention over a ragged batch: fold its results, which lie
// in scratch rows (ragged_batch.hpp), into the accumulated ones; clear results; make a stand-in for
// O. The memory bandwidth limits them. A forward merge of bf16 into f32 moves 6 bytes per element
// where there is no earlier result, 10 elsewhere.

#include <span>

#include "attention/kernels/ragged_batch.hpp"
#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// A Round in device memory; `longest` is the length of its longest piece. Null `pieces`: one piece
/// of rows [0, longest).
struct DeviceRound {
  const RowPiece* pieces = nullptr;
  int64_t count = 0;
  int64_t longest = 0;
};

/// Factor of a stand-in O' for O. Libraries compute delta = <O, dO> from O, while BackwardBlock may
/// have only delta. Any O' with <O', dO> = delta serves. dO · delta / |dO|^2, the shortest, misses
/// delta by up to 2^-9 of it once rounded to bf16; rows that see few keys, whose dP differ little
/// from delta, would show that. So O' is dO times this factor, where `d_out_squared` omits the
/// greatest element of dO; that element of O' takes what the rounded others lack of delta, with an
/// error of 2^-9 of that. The factor is 0 where d_out_squared is 0.
GYRE_HOST_DEVICE inline double stand_in_factor(double delta, double d_out_squared) {
  return d_out_squared > 0 ? delta / d_out_squared : 0;
}
/// Replaces lse = -inf (no visible key) by +inf, so that p = exp(x - LSE) is 0 for any x.
GYRE_HOST_DEVICE inline float lse_for_backward(float lse) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  return lse == -infinity ? infinity : lse;
}

/// How scratch rows combine with their result rows: added to them, or replacing them unread.
enum class Update { add, replace };

/// Merges (merge.hpp) the scratch rows of (partial [scratch rows, heads · value_dim], partial_lse
/// [scratch rows, heads]) into the rows of (out, lse). `partial` and `out` are f32 or bf16. Rows of
/// `out` whose lse is -inf, or all with Update::replace, are not read.
void cuda_merge_rows(const DeviceRound& round, ConstMatrixRef partial,
                     MatrixView<const float> partial_lse, MatrixRef out, MatrixView<float> lse,
                     Update update, Stream& stream);

/// Fills scratch rows of the backward inputs from rows of d_out, lse and delta: stand_in [scratch
/// rows, heads · value_dim] (stand_in_factor), of the type of d_out, and scratch_lse [scratch rows,
/// heads].
void cuda_stand_in_rows(const DeviceRound& round, ConstMatrixRef d_out, MatrixView<const float> lse,
                        MatrixView<const float> delta, MatrixRef stand_in,
                        MatrixView<float> scratch_lse, Stream& stream);

struct RowSums {
  ConstMatrixRef partial;
  MatrixRef sum;
};
/// Adds the scratch rows of `partial` to the rows of `sum`, or replaces these, for one or two
/// pairs; in one launch if both have the same types, columns and strides. Matrices are f32 or bf16.
void cuda_add_rows(const DeviceRound& round, std::span<const RowSums> sums, Update update,
                   Stream& stream);
inline void cuda_add_rows(const DeviceRound& round, ConstMatrixRef partial, MatrixRef sum,
                          Update update, Stream& stream) {
  const RowSums one[] = {{partial, sum}};
  cuda_add_rows(round, one, update, stream);
}

/// Transposes the log-sum-exps of an even batch for a backward pass (lse_for_backward): from rows
/// [first + entry · distance, ... + rows) of lse to [entries, heads, rows].
void cuda_pack_lse(MatrixView<const float> lse, int64_t first, int64_t distance, int64_t entries,
                   int64_t rows, float* to, Stream& stream);

/// Fills the rows of `m`, f32 or bf16, with `value`.
void cuda_fill_rows(const DeviceRound& round, MatrixRef m, float value, Stream& stream);

}  // namespace gyre
