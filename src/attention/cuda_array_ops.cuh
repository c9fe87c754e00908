#pragma once
// How a list of copies becomes launches: a table of up to 64 copies is a parameter of the kernel,
// so that nothing has to be kept until the device has read it. A line is one plane of one row; a
// block takes several, whose elements its threads share out; which copy a block belongs to follows
// from the first block of each.
//
//     copies (rows 100, planes 2), (rows 3, planes 1)     32 lines a block
//     blocks 0..6 the 200 lines of the first, block 7 the 3 lines of the second

#include <limits>
#include <span>
#include <vector>

#include "attention/array_ops.hpp"
#include "runtime/device_code.cuh"

namespace gyre {

/// A copy as the kernel sees it. Strides and width in elements.
struct DeviceCopy {
  const std::byte* from;
  std::byte* to;
  int64_t lines;  ///< rows · planes
  int32_t from_row, from_plane, to_row, to_plane, width;
  int32_t first_block;
  int8_t planes, unit;  ///< unit: elements that one lane moves at once, 1 or 8
  bool from_narrow, via_narrow, to_narrow, add;
};

inline constexpr int most_copies = 64;
struct CopyTable {
  DeviceCopy copies[most_copies];
  int32_t count;
  int32_t blocks;
};
static_assert(sizeof(CopyTable) <= 4096, "what every device takes as parameters of a kernel");

inline constexpr int array_warps = 8;  ///< of a block
inline constexpr int array_threads = array_warps * warp_lanes;
inline constexpr int lines_of_a_block = 32;  ///< of one copy

/// Which of the copies a block works on.
GYRE_HOST_DEVICE inline int copy_of_block(const CopyTable& table, int block) {
  int index = 0;
  for (int step = most_copies / 2; step > 0; step /= 2)
    if (index + step < table.count && table.copies[index + step].first_block <= block)
      index += step;
  return index;
}

/// What a thread of a block copies: packs (what is moved at once) t, t + threads, t + 2 threads,
/// ... of all lines of the block, one line behind the other, so that short lines leave no lane
/// idle.
struct PackWalk {
  int packs, down, right;  ///< packs of a line; what a step goes down, and to the right
  int line, pack;
  GYRE_HOST_DEVICE PackWalk(int packs_of_line, int thread)
      : packs(packs_of_line),
        down(array_threads / packs_of_line),
        right(array_threads % packs_of_line),
        line(thread / packs_of_line),
        pack(thread % packs_of_line) {}
  GYRE_HOST_DEVICE void advance() {
    line += down;
    pack += right;
    if (pack < packs) return;
    pack -= packs;
    ++line;
  }
};

/// Rows and planes of a block's lines, line 0 being line `begin` of the copy.
struct BlockLines {
  int64_t first_row;  ///< of line 0
  int first_plane, planes, inverse;
  GYRE_HOST_DEVICE BlockLines(const DeviceCopy& copy, int64_t begin)
      : first_row(copy.planes == 1 ? begin : begin / copy.planes),
        first_plane(static_cast<int>(begin - first_row * copy.planes)),
        planes(copy.planes),
        inverse(0xffff / copy.planes + 1) {}
  /// Elements from first_row to a line. To divide by `planes` is to multiply here: exact, as lines
  /// and planes of a block are fewer than 2^8.
  GYRE_HOST_DEVICE int64_t at(int line, int row_stride, int plane_stride) const {
    const int i = first_plane + line, row = i * inverse >> 16;
    return static_cast<int64_t>(row) * row_stride +
           static_cast<int64_t>(i - row * planes) * plane_stride;
  }
};
static_assert(lines_of_a_block + std::numeric_limits<int8_t>::max() < 1 << 8);

/// The copies that have elements, in tables whose launches may run one after the other. Copies of
/// one table run at once: if any of them adds, those that write into the same bytes (taken from the
/// first to the last byte of each, so that interleaved heads count as the same) are kept apart.
/// Throws a check error for strides of 2^31 elements.
std::vector<CopyTable> copy_tables(std::span<const RowCopy> copies);

}  // namespace gyre
