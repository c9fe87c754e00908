#pragma once
// Assignment of the rows of a gather or scatter to device threads. The map relates row i of one
// side to row map[i] of the other:
//
//     gather:  out[i] = map[i] in [0, other_rows) ? in[map[i]] : fill
//     scatter: out[map[i]] = in[i] for map[i] in [0, other_rows)
//
// A row is cut into units of 16 bytes if its length and both addresses allow, else of 8, 4, 2 or 1.
// A thread moves one unit in each of `rows_of_thread` rows, to keep that many loads in flight:
//
//     rows of 96 bytes, 16-byte aligned: 6 units, 8 lanes a row, 32 rows a pass, 4 passes a block
//     lane l of rows 128 b + 32 p + k, p < 4, moves unit l of those rows (lanes 6 and 7 are idle)

#include <cstdint>

#include "core/host_device.hpp"
#include "core/index.hpp"

namespace gyre {

struct RowMapShape {
  int64_t units = 1;                        ///< per row
  int unit_bytes = 1;                       ///< 16, 8, 4, 2 or 1
  int lanes = 1;                            ///< threads per row: a power of two, at most `threads`
  static constexpr int threads = 256;       ///< per block
  static constexpr int rows_of_thread = 4;  ///< one in each pass
  GYRE_HOST_DEVICE constexpr int rows_of_pass() const { return threads / lanes; }
  GYRE_HOST_DEVICE constexpr int64_t rows_of_block() const {
    return int64_t{rows_of_thread} * rows_of_pass();
  }
  GYRE_HOST_DEVICE constexpr int64_t blocks(int64_t rows) const {
    return ceil_div(rows, rows_of_block());
  }
  /// The row of which thread `thread` of block `block` moves a part in pass `pass`.
  GYRE_HOST_DEVICE constexpr int64_t row(int64_t block, int thread, int pass) const {
    return block * rows_of_block() + int64_t{pass} * rows_of_pass() + thread / lanes;
  }
  /// The first unit that the thread moves; the others are `lanes` apart.
  GYRE_HOST_DEVICE constexpr int unit(int thread) const { return thread % lanes; }
};

/// The shape for rows of `row_bytes` >= 1 bytes. `addresses` is the bitwise or of all addresses;
/// its largest power-of-two divisor is their common alignment.
GYRE_HOST_DEVICE constexpr RowMapShape row_map_shape(int64_t row_bytes, uint64_t addresses) {
  RowMapShape shape;
  const uint64_t together = static_cast<uint64_t>(row_bytes) | addresses;
  shape.unit_bytes = 16;
  while (together % shape.unit_bytes != 0) shape.unit_bytes /= 2;
  shape.units = row_bytes / shape.unit_bytes;
  while (shape.lanes < shape.units && shape.lanes < RowMapShape::threads) shape.lanes *= 2;
  return shape;
}

/// Whether a map entry is a valid row index.
GYRE_HOST_DEVICE constexpr bool names_row(int32_t entry, int64_t rows) {
  return entry >= 0 && entry < rows;
}

}  // namespace gyre
