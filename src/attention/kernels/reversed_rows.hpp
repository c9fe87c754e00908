#pragma once
// Inverse rectangles, in which a query sees all keys from a diagonal on, as causal ones: the rows
// of queries and of keys are read in reverse order. Libraries compute causal masks only.
//
//     key     0 1 2 3 4                  key     4 3 2 1 0
//     query 0 . x x x x                  query 2 x x . . .
//     query 1 . . x x x        =>        query 1 x x x . .
//     query 2 . . . x x                  query 0 x x x x .
//
// Windows have such rectangles where a shard ends between a query and the begin of its window.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/kernels/ragged_batch.hpp"
#include "attention/rectangle.hpp"

namespace gyre {

/// Whether a rectangle is inverse, with equal strides of queries and keys.
bool is_inverse(const Rectangle& r);

/// Rectangles of scratch arrays that hold the touched rows of an array, in reverse order and
/// without gaps.
struct ReversedRows {
  std::vector<Rectangle> rectangles;  ///< causal, sorted by q_begin
  Round queries, keys;                ///< pieces of rows and of scratch rows, with step -1
  int64_t q_rows = 0, k_rows = 0;     ///< rows of the scratch arrays
};

/// Precondition: all rectangles are inverse.
ReversedRows reversed_rows(std::span<const Rectangle> inverse);

/// Exchanges rows and scratch rows.
Round exchanged(const Round& round);

}  // namespace gyre
