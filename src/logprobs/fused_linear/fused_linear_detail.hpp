#pragma once
// Tiles of logits, shared by the two passes of fused_linear.hpp.

#include <algorithm>

#include "logprobs/fused_linear/fused_linear.hpp"

namespace gyre::fused {

inline size_t row_bytes(ConstMatrixRef m) {
  return m.cols * size_of(m.type);
}

}  // namespace gyre::fused

namespace gyre {

/// Calls body(first column, rows of the weight) for each tile of this rank's valid columns.
template <class Body>
void FusedLinear::for_each_column_tile(ConstMatrixRef weight, Body body) const {
  const int64_t columns = vocab_.valid(tp_.rank());
  for (int64_t c = 0; c < columns; c += options_.tile_columns)
    body(c, weight.rows_from(c, std::min(options_.tile_columns, columns - c)));
}

}  // namespace gyre
