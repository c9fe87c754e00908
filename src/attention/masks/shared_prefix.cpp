#include "attention/masks/list.hpp"

namespace gyre {
namespace {

/// Queries x keys: prompt x prompt, answers x prompt, each answer x itself. The last may be short.
MaskRule make_shared_prefix(std::span<const int64_t> lengths, std::span<const int64_t> values) {
  return mask_of_regions(lengths, [&](int64_t length) {
    const int64_t prompt = std::min(values[0], length);
    std::vector<Region> regions{{0, prompt, 0, prompt, RegionKind::causal},
                                {prompt, length, 0, prompt, RegionKind::full}};
    for_each_block(prompt, length, values[1], [&](int64_t begin, int64_t end) {
      regions.push_back({begin, end, begin, end, RegionKind::causal});
    });
    return regions;
  });
}

}  // namespace

NamedMask shared_prefix_mask() {
  return {"shared-prefix",
          "a prompt, stored once, and answers to it, each of which sees the prompt and itself",
          {{"prompt", "tokens of the prompt", 1, true}, {"answer", "tokens of an answer", 1, true}},
          make_shared_prefix};
}

}  // namespace gyre
