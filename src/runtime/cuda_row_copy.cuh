#pragma once
// Copies as arguments of one kernel. A table of copies is a parameter of a launch, so that no
// memory must be kept until the device has read it. A line is one plane of one row; a lane moves
// one pack of a line at once. A thread block moves consecutive packs of one copy; it finds the copy
// by the first block of each.
//
//     copies (rows 100, planes 2, 64 packs), (rows 3, planes 1, 64 packs)     2048 packs per block
//     blocks 0..6 the 200 lines of the first, block 7 the 3 lines of the second

#include <span>
#include <vector>

#include "core/index.hpp"
#include "runtime/device_code.cuh"
#include "runtime/row_copy.hpp"

namespace gyre {

inline constexpr int copy_threads = 256;
inline constexpr int64_t packs_of_block = 2048;

/// How the elements of a copy are converted: a sum of these. `as_bytes`: elements are bytes.
enum CopyKind : int8_t { from_narrow = 1, to_narrow = 2, via_narrow = 4, adds = 8, as_bytes = 16 };

struct DeviceCopy {
  const std::byte* from;
  std::byte* to;
  int64_t packs;  ///< of all lines; the last line may have less than line_packs
  int32_t line_packs, planes;
  int32_t from_row, from_plane, to_row, to_plane;  ///< strides in packs
  int8_t unit;  ///< elements of a pack: 1 or 8; bytes: 1, 2, 4, 8 or 16
  int8_t kind;  ///< sum of CopyKind
};

/// Bytes without gaps, in less than half of the memory of a DeviceCopy.
struct DeviceSpan {
  const std::byte* from;
  std::byte* to;
  int64_t bytes;
  GYRE_HOST_DEVICE operator DeviceCopy() const {
    const auto bits =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) |
        bytes | 16;
    const int64_t unit = bits & -bits;
    constexpr int32_t line = 1 << 20;
    return {from, to, bytes / unit, line, 1, line, 0, line, 0, static_cast<int8_t>(unit), as_bytes};
  }
};

template <class Copy>
struct CopyTable {
  static constexpr int most = sizeof(Copy) > 24 ? 64 : 128;
  Copy copies[most];
  int32_t first_block[most];
  int32_t count = 0;
  int32_t blocks = 0;

  bool full() const { return count == most; }
  void add(const Copy& copy) {
    const int64_t end = blocks + ceil_div(DeviceCopy(copy).packs, packs_of_block);
    GYRE_CHECK(end <= std::numeric_limits<int32_t>::max(), "{} blocks", end);
    copies[count] = copy;
    first_block[count++] = blocks;
    blocks = static_cast<int32_t>(end);
  }
  /// Index of the copy that a block works on.
  GYRE_HOST_DEVICE int copy_of_block(int block) const {
    int index = 0;
    for (int step = most / 2; step > 0; step /= 2)
      if (index + step < count && first_block[index + step] <= block) index += step;
    return index;
  }
};
static_assert(sizeof(CopyTable<DeviceCopy>) <= 4096 && sizeof(CopyTable<DeviceSpan>) <= 4096,
              "what every device takes as parameters of a kernel");

/// Walk of a thread over the packs first, first + copy_threads, ... of a copy, in the order of
/// rows, planes and packs of a line. The step has these three digits as well, so that a step needs
/// no division.
struct PackWalk {
  int line_packs, planes;
  int64_t row;
  int plane, pack;
  int down, over, right;  ///< rows, planes and packs of a step

  GYRE_HOST_DEVICE static int64_t quotient(int64_t a, int32_t b) {
    if (b == 1) return a;
    constexpr int64_t most = 0xffffffff;  // a division of 64 bits takes long
    return a <= most ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
  }
  GYRE_HOST_DEVICE PackWalk(const DeviceCopy& copy, int64_t first)
      : line_packs(copy.line_packs), planes(copy.planes) {
    const int64_t line = quotient(first, line_packs);
    row = quotient(line, planes);
    plane = static_cast<int>(line - row * planes);
    pack = static_cast<int>(first - line * line_packs);
    const auto lines = static_cast<int>(quotient(copy_threads, line_packs));
    down = static_cast<int>(quotient(lines, planes));
    over = lines - down * planes;
    right = copy_threads - lines * line_packs;
  }
  GYRE_HOST_DEVICE void advance() {
    row += down;
    plane += over;
    pack += right;
    if (pack >= line_packs) pack -= line_packs, ++plane;
    if (plane >= planes) plane -= planes, ++row;
  }
};

/// Groups the nonempty copies into tables to be launched one after the other. Copies of one table
/// run concurrently: if any of `copies` adds, copies that write overlapping byte ranges (from the
/// first to the last byte of each, so that interleaved heads count as overlapping) go to different
/// tables. Throws a check error for strides of 2^31 packs or more.
std::vector<CopyTable<DeviceCopy>> copy_tables(std::span<const RowCopy> copies);

}  // namespace gyre
