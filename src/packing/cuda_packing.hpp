#pragma once
// Documents into packed slots, on a device: ids, next-token labels and positions of every slot are
// gathered from the documents' tokens.
//
//     for each slot   (token, next, position) = slot_source(segments, slot)
//                     ids[slot]       = token < 0 ? 0 : tokens[token]
//                     labels[slot]    = next < 0 ? ignored_label : tokens[next]
//                     positions[slot] = position
//
// The limit is memory: 12 bytes are written and 4 read for each slot (the next token is in the same
// line). The search for the segment reads tables that stay in the caches.

#include <cstdint>
#include <vector>

#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Segments of consecutive slots, from slot 0 on; see slot_source.hpp.
struct SegmentLists {
  std::vector<int64_t> first_slot{0};  ///< [segments + 1]
  std::vector<int32_t> real_length;    ///< [segments]
  std::vector<int64_t> first_token;    ///< [segments]
  void add(int64_t slots, int32_t length, int64_t token) {
    first_slot.push_back(first_slot.back() + slots);
    real_length.push_back(length);
    first_token.push_back(token);
  }
  int64_t slots() const { return first_slot.back(); }
};

/// Arrays of the slots, [slots] each, in device memory.
struct DeviceSlots {
  Buffer<int32_t> ids, labels, positions;
};

/// Packs `tokens` [count], in host memory, by the segments. Complete on return on `stream`, a CUDA
/// stream. Throws a usage error that names the segment unless 0 <= real length <= slots and its
/// tokens are among the `tokens`.
DeviceSlots pack_slots_on_device(const SegmentLists& segments, std::span<const int32_t> tokens,
                                 Stream& stream);

}  // namespace gyre
