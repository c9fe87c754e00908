#pragma once
// Documents of any length in a layout.

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layouts.hpp"

namespace gyre {

/// Documents one after the other, each in as many slots as the layout requires of a segment.
/// `offsets`: [documents + 1], where documents begin and the last one ends, in tokens. Throws a
/// usage error for more than 2^31 - 1 slots.
struct PaddedLayout {
  std::vector<int32_t> real = {0}, padded = {0};  ///< as SegmentBounds
  Layout layout;
  PaddedLayout(std::span<const int64_t> offsets, const LayoutKind& kind,
               const LayoutOptions& options);
};

}  // namespace gyre
