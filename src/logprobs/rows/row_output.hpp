#pragma once
// Output of the passes over a shard: whole rows, bypassing the caches where that is faster.

#include <hwy/cache_control.h>

#include <cstdint>

#include "core/matrix_ref.hpp"
#include "runtime/parallel.hpp"

namespace gyre {

struct RowOutput {
  MatrixRef matrix;
  bool stream;  ///< bypass the caches
};

/// Output to `to`. It bypasses the caches if `to` is too large to be found there later and is not
/// the memory of `from`.
RowOutput output_at(const MatrixRef& to, const ConstMatrixRef& from);

/// Columns [begin, end) of row r <- value.
void fill(const RowOutput& out, int64_t r, int64_t begin, int64_t end, float value);
/// Columns [begin, end) of row r <- 0. May bypass the caches even in place: the row was not read.
void clear(const RowOutput& out, int64_t r, int64_t begin, int64_t end);

/// Calls body(begin, end) for parts of the rows, distributed over threads; a column takes about
/// 0.15 ns.
template <class Body>
void for_each_row_part(int threads, int64_t rows, int64_t columns, Body body) {
  const double nanoseconds = 0.15 * columns + 10;
  for_each_part(threads, rows, nanoseconds, [&](int64_t begin, int64_t end, int) {
    body(begin, end);
    hwy::FlushStream();  // makes streaming stores visible to other threads
  });
}

}  // namespace gyre
