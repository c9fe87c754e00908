#pragma once
// Source token of a packed slot: index arithmetic shared by host and device.
//
//     segment     the last one whose first slot is <= the slot, which skips empty segments
//     index       slot - first slot of the segment
//     position    first position + index: not 0 where a document continues a shared prefix
//     token       first token + index, if index < real length; else none
//     next        token + 1, if index + 1 < real length; else none: the label is ignored
//
// 2 segments of 3 and 1 real tokens in 4 and 2 slots; first tokens 10 and 0, first positions 0 and
// 7:
//
//     slot        0   1   2   3   4   5
//     token      10  11  12   -   0   -
//     next       11  12   -   -   -   -
//     position    0   1   2   3   7   8

#include <cstdint>

#include "core/host_device.hpp"

namespace gyre {

/// Views of the segments of consecutive slots, from slot 0 on.
struct SegmentTable {
  int64_t segments = 0;
  const int64_t* first_slot = nullptr;      ///< [segments + 1], ascending, from 0
  const int32_t* real_length = nullptr;     ///< [segments]
  const int64_t* first_token = nullptr;     ///< [segments]
  const int32_t* first_position = nullptr;  ///< [segments]
};

struct SlotSource {
  int64_t token = -1;    ///< -1: padding
  int64_t next = -1;     ///< -1: no label
  int32_t position = 0;  ///< in the document, padding included
};

/// Precondition: slot < first_slot[segments].
GYRE_HOST_DEVICE inline SlotSource slot_source(const SegmentTable& table, int64_t slot) {
  int64_t low = 0, high = table.segments;  // first_slot[low] <= slot < first_slot[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (table.first_slot[middle] <= slot)
      low = middle;
    else
      high = middle;
  }
  SlotSource source;
  const auto index = static_cast<int32_t>(slot - table.first_slot[low]);
  const int32_t length = table.real_length[low];
  source.position = table.first_position[low] + index;
  if (index < length) source.token = table.first_token[low] + index;
  if (index + 1 < length) source.next = source.token + 1;
  return source;
}

}  // namespace gyre
