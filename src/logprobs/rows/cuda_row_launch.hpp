#pragma once
// Kernel launches for cuda_row_kernels.cpp: all pointers are device pointers, and no call waits.

#include <cstdint>

#include "core/matrix_ref.hpp"
#include "logprobs/rows/row_arithmetic.hpp"
#include "logprobs/rows/row_kernels.hpp"

struct CUstream_st;

namespace gyre::rows {

/// Writes parts [rows, parts_of(columns, part_columns)].
void launch_part_sums(CUstream_st* stream, ConstMatrixRef logits, const RowScan& scan,
                      PartSums* parts);
/// Writes out [rows]; `parts` is scratch, as in the functions below.
void launch_partials(CUstream_st* stream, ConstMatrixRef logits, const RowScan& scan,
                     PartSums* parts, SoftmaxPartial* out);
void launch_cross_partials(CUstream_st* stream, ConstMatrixRef student, ConstMatrixRef teacher,
                           int64_t columns, CrossSums* parts, CrossPartial* out);
void launch_sums(CUstream_st* stream, ConstMatrixRef values, int64_t columns, double* parts,
                 double* out);

/// Ids with weights, each [rows, per_row]; `bases` is scratch of that size, unless per_row is 1.
struct DeviceTokenIds {
  const int32_t* ids = nullptr;
  const float* weights = nullptr;
  int64_t per_row = 0, first_column = 0;
  float* bases = nullptr;
};

/// Inputs of a gradient: `coefficients`, null if there are only weights; with `survivors`,
/// filtered, and then one id per row.
struct GradientTask {
  RowPass pass;
  const RowNormalizer* normalizers = nullptr;
  const GradientCoefficients* coefficients = nullptr;
  const RowSurvivors* survivors = nullptr;
  DeviceTokenIds token_ids;
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
/// values [rows, per_row] <- logits of ids within the first `columns`; other values are unchanged.
void launch_gather(CUstream_st* stream, ConstMatrixRef logits, int64_t columns,
                   const DeviceTokenIds& token_ids, float* values);

/// Entries of a sparse matrix, grouped: those of group i from offsets[i] to offsets[i + 1] - 1.
struct DeviceEntries {
  const int32_t* offsets = nullptr;
  const ProjectionShard::Entry* entries = nullptr;
};
/// Σ_c d_c out_c of a row, and whether a d_c is not 0.
struct RowCentre {
  float value = 0;
  bool needed = false;
};
/// Gradients of row_projection.hpp. `by_row`: groups are the valid columns of the shard.
void launch_projection_gradient(CUstream_st* stream, ConstMatrixRef logits, const RowPass& pass,
                                const RowNormalizer* normalizers, const RowCentre* centres,
                                const DeviceEntries& by_row, MatrixView<const float> d_projected,
                                MatrixRef out);

/// Sizes of the candidate lists of a selection.
struct SelectionShape {
  int64_t length = 0;          ///< number of elements to select per row
  int64_t columns = 0;         ///< number of valid columns
  int64_t parts = 0;           ///< parts per row
  int64_t part_length = 0;     ///< entries of a part's list
  int64_t part_capacity = 0;   ///< list capacity of a block for a part of a row
  int64_t merge_capacity = 0;  ///< list capacity of a block that merges a row's lists
  bool part_spills = false;    ///< whether the list of a part is in device memory, not shared
  bool merge_spills = false;
};
SelectionShape selection_shape(int64_t columns, int64_t length);

/// Outputs of the selection for some rows, then its scratch.
struct SelectionTask {
  float* values = nullptr;             ///< [rows, length]
  int32_t* ids = nullptr;              ///< [rows, length]
  int32_t* last = nullptr;             ///< [rows]
  SoftmaxPartial* partials = nullptr;  ///< [rows], or null
  uint64_t* lists = nullptr;           ///< [rows, parts, part_length]
  int32_t* lasts = nullptr;            ///< [rows, parts]
  PartSums* sums = nullptr;            ///< [rows, parts], with partials
  uint64_t* part_room = nullptr;       ///< [rows, parts, part_capacity], with part_spills
  uint64_t* merge_room = nullptr;      ///< [rows, merge_capacity], with merge_spills
};
void launch_selection(CUstream_st* stream, ConstMatrixRef logits, const RowScan& scan,
                      const SelectionShape& shape, const SelectionTask& task);

/// Adds to masses [count, digit_sums], which must be 0 initially.
void launch_masses(CUstream_st* stream, ConstMatrixRef logits, int64_t columns, const MassRow* rows,
                   int64_t count, int64_t* masses);
/// Adds to counts [count], which must be 0 initially.
void launch_counts(CUstream_st* stream, ConstMatrixRef logits, const ColumnQuery* queries,
                   int64_t count, ColumnCounts* counts);
/// found [count] <- column of each query's n-th last tie; -1 if the row has fewer ties.
void launch_ties(CUstream_st* stream, ConstMatrixRef logits, int64_t columns,
                 const TieQuery* queries, int64_t count, int64_t* found);

}  // namespace gyre::rows
