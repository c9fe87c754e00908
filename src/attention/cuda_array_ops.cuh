#pragma once
// How a list of copies becomes launches: a table of up to 64 copies is a parameter of the kernel,
// so that nothing has to be kept until the device has read it. A warp takes one line (one plane of
// one row), a block several; which copy a block belongs to follows from the first block of each.
//
//     copies (rows 100, planes 2), (rows 3, planes 1)     32 lines a block
//     blocks 0..6 the 200 lines of the first, block 7 the 3 lines of the second

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

inline constexpr int array_warps = 8;        ///< of a block
inline constexpr int lines_of_a_block = 32;  ///< of one copy

/// Which of the copies a block works on.
GYRE_HOST_DEVICE inline int copy_of_block(const CopyTable& table, int block) {
  int index = 0;
  for (int step = most_copies / 2; step > 0; step /= 2)
    if (index + step < table.count && table.copies[index + step].first_block <= block)
      index += step;
  return index;
}

/// The copies that have elements, in tables whose launches may run one after the other. Copies of
/// one table run at once: if any of them adds, those that write into the same bytes (taken from the
/// first to the last byte of each, so that interleaved heads count as the same) are kept apart.
/// Throws a check error for strides of 2^31 elements.
std::vector<CopyTable> copy_tables(std::span<const RowCopy> copies);

}  // namespace gyre
