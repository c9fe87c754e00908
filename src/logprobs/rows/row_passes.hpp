#pragma once
// Passes over a shard that compute a few numbers per row.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/error.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/parallel.hpp"

namespace gyre {

/// Calls body(row) for all rows, distributed over threads; a column takes about 0.12 ns.
template <class Body>
void for_each_row(int threads, int64_t rows, int64_t columns, Body body) {
  const double nanoseconds = 0.12 * columns + 10;
  for_each_part(threads, rows, nanoseconds, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}

inline void check_rows(const ConstMatrixRef& matrix, int64_t columns, size_t results) {
  GYRE_CHECK(0 <= columns && columns <= matrix.cols && std::cmp_equal(results, matrix.rows),
             "{} of {} columns, {} rows, {} results", columns, matrix.cols, matrix.rows, results);
}

}  // namespace gyre
