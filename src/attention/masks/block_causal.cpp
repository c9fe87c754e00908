#include "attention/masks/list.hpp"

namespace gyre {
namespace {

MaskRule make_block_causal(std::span<const int64_t> lengths, std::span<const int64_t> values) {
  return mask_of_regions(lengths, [&](int64_t length) {
    std::vector<Region> regions;
    for_each_block(0, length, values[0], [&](int64_t begin, int64_t end) {
      regions.push_back({begin, end, 0, end, RegionKind::full});
    });
    return regions;
  });
}

}  // namespace

NamedMask block_causal_mask() {
  return {"block-causal",
          "a query sees its whole block and all earlier blocks",
          {{"block", "tokens per block, e.g. of a video frame", 1, true}},
          make_block_causal};
}

}  // namespace gyre
