#include "attention/masks/list.hpp"

namespace gyre {
namespace {

/// Causal: the queries of each part see its own keys; those of the last part see all parts.
MaskRule make_causal_blockwise(std::span<const int64_t> parts, std::span<const int64_t>) {
  return mask_of_joined(parts, [](std::span<const int64_t> offsets) {
    std::vector<Region> regions;
    for (size_t i = 0; i + 1 < offsets.size(); ++i) {
      const bool last = i + 2 == offsets.size();
      regions.push_back(
          {offsets[i], offsets[i + 1], last ? 0 : offsets[i], offsets[i + 1], RegionKind::causal});
    }
    return regions;
  });
}

}  // namespace

NamedMask causal_blockwise_mask() {
  return {"causal-blockwise",
          "documents are one: each sees itself, causally, and the last sees all of them, as a "
          "question after examples",
          {},
          make_causal_blockwise,
          true};
}

}  // namespace gyre
