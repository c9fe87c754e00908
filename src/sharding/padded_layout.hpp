#pragma once
// A layout of documents of any length.

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layouts.hpp"

namespace gyre {

/// Concatenates documents, each padded to a multiple of kind.segment_multiple(options.cp) slots.
/// `offsets` [documents + 1]: prefix sums of document lengths in tokens. Throws a usage error for
/// more than 2^31 - 1 slots.
struct PaddedLayout {
  std::vector<int32_t> real = {0}, padded = {0};  ///< as SegmentBounds
  Layout layout;
  PaddedLayout(std::span<const int64_t> offsets, const LayoutKind& kind,
               const LayoutOptions& options);
};

}  // namespace gyre
