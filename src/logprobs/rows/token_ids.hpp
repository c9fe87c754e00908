#pragma once
// Elements of rows at given ids: the logits of targets and candidates, and their gradients.

#include <cstdint>
#include <span>

#include "core/matrix_ref.hpp"

namespace gyre {

/// Ids of each row, at most 65536, each with a weight, its part of the gradient. An id may occur
/// several times in a row; ids outside this shard's valid columns are skipped.
struct RowTokenIds {
  std::span<const int32_t> ids;    ///< [rows, per_row] global ids
  std::span<const float> weights;  ///< [rows, per_row]
  int64_t per_row = 0;
  int64_t first_column = 0;  ///< global id of column 0 of the shard
};

/// d_logits [rows, cols] <- weights at the ids, 0 elsewhere.
void scatter_token_weights(const RowTokenIds& token_ids, int64_t columns, MatrixRef d_logits,
                           int threads);

/// values [rows, per_row] <- logits of the ids in this shard; other values are unchanged.
/// `columns`: number of valid columns, the first of each row.
void gather_token_logits(ConstMatrixRef logits, std::span<const int32_t> ids, int64_t per_row,
                         int64_t first_column, int64_t columns, std::span<float> values);

}  // namespace gyre
