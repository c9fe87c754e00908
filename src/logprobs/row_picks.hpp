#pragma once
// The elements of a row that have an id: the logits of targets and candidates, and their gradients.

#include <cstdint>
#include <span>

#include "core/matrix_ref.hpp"

namespace gyre {

/// Ids with a gradient of their own, at most 65536 a row. An id may occur several times in a row;
/// those that are not in this shard's valid columns are passed over.
struct RowPicks {
  std::span<const int32_t> ids;    ///< [rows, per_row] global ids
  std::span<const float> weights;  ///< [rows, per_row]
  int64_t per_row = 0;
  int64_t first_column = 0;  ///< global id of column 0 of the shard
};

/// d_logits [rows, cols] <- weights at the picks, 0 elsewhere.
void scatter_picks(const RowPicks& picks, int64_t columns, MatrixRef d_logits, int threads);

/// values [rows, per_row] <- the logits of the ids that this shard holds; the others are left as
/// they are. `columns`: valid ones, the first of each row.
void gather_picks(ConstMatrixRef logits, std::span<const int32_t> ids, int64_t per_row,
                  int64_t first_column, int64_t columns, std::span<float> values);

}  // namespace gyre
