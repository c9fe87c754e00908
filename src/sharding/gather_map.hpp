#pragma once
// How the rows of a gather, or of its inverse, are dealt over the threads of a device. Row i of the
// one side is row map[i] of the other:
//
//     gather:  out[i] = map[i] in [0, other_rows) ? in[map[i]] : fill
//     scatter: out[map[i]] = in[i] for map[i] in [0, other_rows)
//
// A row is cut into units of 16 bytes where its length and both addresses allow, else of 8, 4, 2 or
// 1. A thread moves one unit of `rows_of_thread` rows, so that as many loads are under way:
//
//     rows of 96 bytes, 16-byte aligned: 6 units, 8 lanes a row, 32 rows a pass, 4 passes a block
//     lane l of rows 128 b + 32 p + k, p < 4, moves unit l of those rows (lanes 6 and 7 nothing)

#include <cstdint>

#include "core/host_device.hpp"
#include "core/index.hpp"

namespace gyre {

struct RowMapShape {
  int64_t units = 1;                        ///< of a row
  int unit_bytes = 1;                       ///< 16, 8, 4, 2 or 1
  int lanes = 1;                            ///< threads of a row: a power of two, at most `threads`
  static constexpr int threads = 256;       ///< of a block
  static constexpr int rows_of_thread = 4;  ///< passes
  GYRE_HOST_DEVICE constexpr int rows_of_pass() const { return threads / lanes; }
  GYRE_HOST_DEVICE constexpr int64_t rows_of_block() const {
    return int64_t{rows_of_thread} * rows_of_pass();
  }
  GYRE_HOST_DEVICE constexpr int64_t blocks(int64_t rows) const {
    return ceil_div(rows, rows_of_block());
  }
  /// The row that thread `thread` of block `block` moves a part of in pass `pass`.
  GYRE_HOST_DEVICE constexpr int64_t row(int64_t block, int thread, int pass) const {
    return block * rows_of_block() + int64_t{pass} * rows_of_pass() + thread / lanes;
  }
  /// The first unit that the thread moves; the others are `lanes` apart.
  GYRE_HOST_DEVICE constexpr int unit(int thread) const { return thread % lanes; }
};

/// The shape for rows of `row_bytes` >= 1 bytes at addresses that are multiples of the largest
/// power of two in `addresses` (the bitwise or of them).
GYRE_HOST_DEVICE constexpr RowMapShape row_map_shape(int64_t row_bytes, uint64_t addresses) {
  RowMapShape shape;
  const uint64_t together = static_cast<uint64_t>(row_bytes) | addresses;
  shape.unit_bytes = 16;
  while (together % static_cast<uint64_t>(shape.unit_bytes) != 0) shape.unit_bytes /= 2;
  shape.units = row_bytes / shape.unit_bytes;
  while (shape.lanes < shape.units && shape.lanes < RowMapShape::threads) shape.lanes *= 2;
  return shape;
}

/// Whether a map's entry names a row.
GYRE_HOST_DEVICE constexpr bool names_row(int32_t entry, int64_t rows) {
  return entry >= 0 && entry < rows;
}

}  // namespace gyre
