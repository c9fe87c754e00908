#include "attention/masks/list.hpp"

namespace gyre {
namespace {

MaskRule make_block_causal(std::span<const int64_t> lengths, std::span<const int64_t> values) {
  return mask_of_regions(lengths, [&](int64_t length) {
    std::vector<Region> regions;
    for (int64_t begin = 0; begin < length; begin += values[0]) {
      const int64_t end = std::min(begin + values[0], length);
      regions.push_back({begin, end, 0, end, RegionKind::full});
    }
    return regions;
  });
}

}  // namespace

NamedMask block_causal_mask() {
  return {"block-causal",
          "a query sees its block, all of it, and the blocks before",
          {{"block", "tokens of a block: of a frame of a video, say", 1, true}},
          make_block_causal};
}

}  // namespace gyre
