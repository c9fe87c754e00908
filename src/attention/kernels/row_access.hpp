#pragma once
// Access in f32 to rows of matrices whose element type is known at run time.

#include <algorithm>
#include <cstdint>

#include "core/matrix_ref.hpp"

namespace gyre {

/// to[0, count) = factor · row[column, column + count)
inline void load_row(ConstMatrixRef from, int64_t row, int64_t column, int64_t count, float factor,
                     float* to) {
  if (from.type == DType::f32) {
    const float* x = from.as<float>().row(row) + column;
    for (int64_t i = 0; i < count; ++i) to[i] = factor * x[i];
  } else {
    const bf16* x = from.as<bf16>().row(row) + column;
    for (int64_t i = 0; i < count; ++i) to[i] = factor * to_float(x[i]);
  }
}

/// row[column, column + count) of a bf16 matrix = from[0, count)
inline void store_row(const float* from, int64_t row, int64_t column, int64_t count, MatrixRef to) {
  bf16* x = to.as<bf16>().row(row) + column;
  for (int64_t i = 0; i < count; ++i) x[i] = to_bf16(from[i]);
}

/// Prefetches columns [column, column + columns) of some rows. The rows of a short document are
/// read from memory, and are too few for the hardware prefetcher.
inline void prefetch(ConstMatrixRef from, int64_t row, int64_t rows, int64_t column,
                     int64_t columns) {
  constexpr int64_t line = 64;
  asm volatile("");  // without it GCC removes calls of a function that only prefetches
  const int64_t size = size_of(from.type);
  for (int64_t r = row; r < row + rows; ++r)
    for (int64_t i = 0; i < columns * size; i += line)
      __builtin_prefetch(from.data + (r * from.stride + column) * size + i, 0, 2);
}

}  // namespace gyre
