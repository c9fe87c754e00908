#include "attention/masks/list.hpp"

namespace gyre {
namespace {

MaskRule make_prefix_lm(std::span<const int64_t> lengths, std::span<const int64_t> values) {
  return mask_of_regions(lengths, [&](int64_t length) {
    const int64_t prefix = std::min(values[0], length);
    return std::vector<Region>{{0, length, 0, prefix, RegionKind::full},
                               {prefix, length, prefix, length, RegionKind::causal}};
  });
}

}  // namespace

NamedMask prefix_lm_mask() {
  return {"prefix-lm",
          "causal, and all queries see the first tokens",
          {{"prefix", "how many", 1, true}},
          make_prefix_lm};
}

}  // namespace gyre
