#include "attention/masks/list.hpp"

namespace gyre {
namespace {

MaskRule make_chunked(std::span<const int64_t> lengths, std::span<const int64_t> values) {
  return mask_of_regions(lengths, [&](int64_t length) {
    std::vector<Region> regions;
    for (int64_t begin = 0; begin < length; begin += values[0]) {
      const int64_t end = std::min(begin + values[0], length);
      regions.push_back({begin, end, begin, end, RegionKind::causal});
    }
    return regions;
  });
}

}  // namespace

NamedMask chunked_mask() {
  return {"chunked",
          "causal inside of a chunk, as the local layers of Llama 4",
          {{"chunk", "tokens of a chunk", 1, true}},
          make_chunked};
}

}  // namespace gyre
