#pragma once
// Batches a list of copies into kernel launches. A table of up to 64 copies is passed as a kernel
// parameter, so that no memory must be kept until the device has read it. A line is one plane of
// one row. A thread block copies several lines of one copy with all its threads; it finds the copy
// by the first block of each.
//
//     copies (rows 100, planes 2), (rows 3, planes 1)     32 lines per block
//     blocks 0..6 the 200 lines of the first, block 7 the 3 lines of the second

#include <span>
#include <vector>

#include "attention/array_ops.hpp"
#include "runtime/device_code.cuh"

namespace gyre {

/// A copy as a kernel argument. Strides and width in elements.
struct DeviceCopy {
  const std::byte* from;
  std::byte* to;
  int64_t lines;  ///< rows · planes
  int32_t from_row, from_plane, to_row, to_plane, width;
  int32_t first_block;
  int8_t planes, unit;  ///< unit: elements that one lane moves at once, 1 or 8
  bool from_narrow, via_narrow, to_narrow, add;
};

inline constexpr int max_copies = 64;
inline constexpr int max_planes = 64;  ///< of a copy in a table
struct CopyTable {
  DeviceCopy copies[max_copies];
  int32_t count;
  int32_t blocks;
};
static_assert(sizeof(CopyTable) <= 4096, "what every device takes as parameters of a kernel");

inline constexpr int array_warps = 8;  ///< per block
inline constexpr int array_threads = array_warps * warp_lanes;
inline constexpr int lines_of_a_block = 32;  ///< at most; all of one copy

/// Index of the copy that a block works on.
GYRE_HOST_DEVICE inline int copy_of_block(const CopyTable& table, int block) {
  int index = 0;
  for (int step = max_copies / 2; step > 0; step /= 2)
    if (index + step < table.count && table.copies[index + step].first_block <= block)
      index += step;
  return index;
}

/// Walk of a thread t over the packs (elements moved at once) of the lines of a block,
/// concatenated: packs t, t + threads, t + 2 threads, ..., so that short lines leave no lane idle.
struct PackWalk {
  int packs, down, right;  ///< packs per line; lines and packs that a step advances
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

/// Maps the lines of a block to rows and planes; line 0 is line `begin` of the copy.
struct BlockLines {
  int64_t first_row;  ///< of line 0
  int first_plane, planes, inverse;
  GYRE_HOST_DEVICE BlockLines(const DeviceCopy& copy, int64_t begin)
      : first_row(copy.planes == 1 ? begin : begin / copy.planes),
        first_plane(static_cast<int>(begin - first_row * copy.planes)),
        planes(copy.planes),
        inverse(0xffff / copy.planes + 1) {}
  /// Elements between the begin of first_row and that of a line. Divides by `planes` through a
  /// multiplication, which is exact since first_plane + line < 2^8.
  GYRE_HOST_DEVICE int64_t at(int line, int row_stride, int plane_stride) const {
    const int i = first_plane + line, row = i * inverse >> 16;
    return static_cast<int64_t>(row) * row_stride +
           static_cast<int64_t>(i - row * planes) * plane_stride;
  }
};
static_assert(lines_of_a_block + max_planes < 1 << 8);

/// Groups the nonempty copies into tables to be launched one after the other. Copies of one table
/// run concurrently: if any of `copies` adds, copies that write overlapping byte ranges (from the
/// first to the last byte of each, so that interleaved heads count as overlapping) go to different
/// tables. Throws a check error for strides of 2^31 elements or more.
std::vector<CopyTable> copy_tables(std::span<const RowCopy> copies);

}  // namespace gyre
