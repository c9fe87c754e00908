#pragma once
// A mask by name: the entry type of list.hpp.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/mask.hpp"

namespace gyre {

/// A parameter of a mask.
struct MaskKey {
  std::string name, summary;
  int64_t minimum = 0;
  bool required = false;  ///< if not required, the default is 0
};

struct NamedMask {
  std::string name, summary;
  std::vector<MaskKey> keys;
  /// The mask for documents of these lengths; values[i] is the value of keys[i].
  MaskRule (&make)(std::span<const int64_t> lengths, std::span<const int64_t> values);
  /// Whether the mask is of one document that consists of the given ones.
  bool joins = false;
  /// Whether each query selects keys of its own, which a kernel gathers.
  bool selects = false;
};

/// A mask table whose regions are regions_of(length) of each document. They must lie inside the
/// document; empty ones are dropped.
template <class RegionsOf>
MaskRule mask_of_regions(std::span<const int64_t> lengths, RegionsOf regions_of) {
  std::vector<std::vector<Region>> documents;
  for (const int64_t length : lengths)
    std::erase_if(documents.emplace_back(regions_of(length)), [](const Region& region) {
      return region.q_begin >= region.q_end || region.k_begin >= region.k_end;
    });
  return MaskRule(MaskTable(std::move(documents), lengths));
}

/// A mask table of one document that consists of `parts`. regions_of(offsets) returns its regions;
/// offsets are those of the parts that have tokens.
template <class RegionsOf>
MaskRule mask_of_joined(std::span<const int64_t> parts, RegionsOf regions_of) {
  std::vector<int64_t> offsets{0};
  for (const int64_t length : parts)
    if (length > 0) offsets.push_back(offsets.back() + length);
  const int64_t whole[] = {offsets.back()};
  return mask_of_regions(whole, [&](int64_t) { return regions_of(offsets); });
}

/// Calls f(begin, end) for runs of `size` positions in [first, length); the last may be shorter.
template <class F>
void for_each_block(int64_t first, int64_t length, int64_t size, F f) {
  for (int64_t begin = first; begin < length; begin += size)
    f(begin, std::min(begin + size, length));
}

}  // namespace gyre
