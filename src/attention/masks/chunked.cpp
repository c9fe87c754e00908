#include "attention/masks/list.hpp"

namespace gyre {
namespace {

MaskRule make_chunked(std::span<const int64_t> lengths, std::span<const int64_t> values) {
  return mask_of_regions(lengths, [&](int64_t length) {
    std::vector<Region> regions;
    for_each_block(0, length, values[0], [&](int64_t begin, int64_t end) {
      regions.push_back({begin, end, begin, end, RegionKind::causal});
    });
    return regions;
  });
}

}  // namespace

NamedMask chunked_mask() {
  return {"chunked",
          "causal within each chunk, as in the local layers of Llama 4",
          {{"chunk", "tokens per chunk", 1, true}},
          make_chunked};
}

}  // namespace gyre
