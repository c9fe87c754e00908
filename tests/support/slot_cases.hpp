#pragma once
// Segments that packers of slots are tested with.

#include "packing/slot_packer.hpp"

namespace gyre::test {

/// 9 slots for 5 tokens: segments without slots, one of
/// padding alone, and one that goes on at position 5.
inline SegmentLists segments_with_gaps() {
  SegmentLists segments;
  segments.add(0, 0, 0);
  segments.add(4, 2, 3);
  segments.add(0, 0, 5);
  segments.add(2, 0, 5);
  segments.add(3, 3, 0, 5);
  return segments;
}

}  // namespace gyre::test
