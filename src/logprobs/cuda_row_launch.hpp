#pragma once
// The kernels of cuda_row_kernels.hpp, as it starts them: all pointers are to device memory, and
// nothing is waited for. Of cuda_row_kernels.cpp alone.

#include <cstdint>

#include "core/matrix_ref.hpp"
#include "logprobs/row_arithmetic.hpp"
#include "logprobs/row_kernels.hpp"

struct CUstream_st;

namespace gyre::rows {

/// parts [rows, parts_of(columns, part_columns)]
void launch_part_moments(CUstream_st* stream, ConstMatrixRef logits, const RowScan& scan,
                         PartSums* parts);
/// out [rows]; `parts` is scratch, here and below.
void launch_moments(CUstream_st* stream, ConstMatrixRef logits, const RowScan& scan,
                    PartSums* parts, RowMoments* out);
void launch_cross_moments(CUstream_st* stream, ConstMatrixRef student, ConstMatrixRef teacher,
                          int64_t columns, CrossSums* parts, CrossMoments* out);
void launch_sums(CUstream_st* stream, ConstMatrixRef values, int64_t columns, double* parts,
                 double* out);

/// Ids with weights: [rows, per_row] each; `columns` and `bases` are scratch of that size.
struct DevicePicks {
  const int32_t* ids = nullptr;
  const float* weights = nullptr;
  int64_t per_row = 0, first_column = 0;
  int32_t* columns = nullptr;
  float* bases = nullptr;
};

/// What is written: `slopes` or, with `survivors`, `a`; null: weights alone. `kinds` [rows] is
/// scratch.
struct GradientTask {
  RowPass pass;
  const RowNormalizer* normalizers = nullptr;
  const RowSlope* slopes = nullptr;
  const RowSurvivors* survivors = nullptr;
  DevicePicks picks;
  RowKind* kinds = nullptr;
};
void launch_gradient(CUstream_st* stream, ConstMatrixRef logits, const GradientTask& task,
                     MatrixRef out);
void launch_log_softmax(CUstream_st* stream, ConstMatrixRef logits, const RowPass& pass,
                        const RowNormalizer* normalizers, bool exponentiate, MatrixRef out);
void launch_log_softmax_gradient(CUstream_st* stream, ConstMatrixRef logits,
                                 ConstMatrixRef d_logprobs, const RowPass& pass,
                                 const RowNormalizer* normalizers, const float* sums,
                                 MatrixRef out);
void launch_cross_gradient(CUstream_st* stream, ConstMatrixRef student, ConstMatrixRef teacher,
                           int64_t columns, const RowNormalizer* students,
                           const RowNormalizer* teachers, const float* gradients, MatrixRef out);
/// values [rows, per_row] of the ids of these columns; others stay.
void launch_gather(CUstream_st* stream, ConstMatrixRef logits, int64_t columns,
                   const DevicePicks& picks, float* values);

/// Sizes of the lists that blocks keep.
struct SelectionShape {
  int64_t length = 0;          ///< M
  int64_t columns = 0;         ///< valid ones
  int64_t parts = 0;           ///< of a row
  int64_t part_length = 0;     ///< entries of a part's list
  int64_t part_capacity = 0;   ///< entries that a block has room for, in a part of a row
  int64_t merge_capacity = 0;  ///< and where the lists of a row are merged
  bool part_spills = false;    ///< whether that room is scratch, and not shared memory
  bool merge_spills = false;
};
SelectionShape selection_shape(int64_t columns, int64_t length);

/// What selection writes to, of some rows; scratch below.
struct SelectionTask {
  float* values = nullptr;         ///< [rows, length]
  int32_t* ids = nullptr;          ///< [rows, length]
  int32_t* last = nullptr;         ///< [rows]
  RowMoments* moments = nullptr;   ///< [rows], or null
  uint64_t* lists = nullptr;       ///< [rows, parts, part_length]
  int32_t* lasts = nullptr;        ///< [rows, parts]
  PartSums* sums = nullptr;        ///< [rows, parts], if moments
  uint64_t* part_room = nullptr;   ///< [rows, parts, part_capacity], if part_spills
  uint64_t* merge_room = nullptr;  ///< [rows, merge_capacity], if merge_spills
};
void launch_selection(CUstream_st* stream, ConstMatrixRef logits, const RowScan& scan,
                      const SelectionShape& shape, const SelectionTask& task);

/// masses [count, digit_sums], which must be 0.
void launch_masses(CUstream_st* stream, ConstMatrixRef logits, int64_t columns, const MassRow* rows,
                   int64_t count, int64_t* masses);
/// counts [count], which must be 0.
void launch_counts(CUstream_st* stream, ConstMatrixRef logits, const ColumnQuery* queries,
                   int64_t count, ColumnCounts* counts);
/// found [count]; -1 where there are fewer.
void launch_ties(CUstream_st* stream, ConstMatrixRef logits, int64_t columns,
                 const TieQuery* queries, int64_t count, int64_t* found);

}  // namespace gyre::rows
