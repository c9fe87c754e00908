#pragma once
// Loops over the records of rows, in the memory of the kernels. For .cu files of this folder.

#include <cstdint>

#include "runtime/for_rows.cuh"
#include "runtime/parallel.hpp"

namespace gyre {

/// Calls f(row, lanes) for all rows; each call merges `parts` parts. On the host, rows are
/// distributed over threads.
template <class F>
void for_record_rows(Stream& stream, int threads, int64_t rows, int64_t parts, const F& f) {
  if (stream.space() == MemorySpace::device) return for_rows(stream, rows, f);
  const double nanoseconds = 30.0 * (parts + 2);
  for_each_part(threads, rows, nanoseconds, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) f(row, OneLane());
  });
}

}  // namespace gyre
