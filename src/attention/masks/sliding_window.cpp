#include "attention/masks/list.hpp"

namespace gyre {
namespace {

/// Adds the pairs of [first, length) whose distance is at most `window`. Queries below `low` reach
/// the first position, those from `high` on the last one; the others see a band.
void add_band(int64_t first, int64_t length, int64_t window, std::vector<Region>& regions) {
  const int64_t low = std::min(first + window, length), high = std::max(length - window, first);
  const int64_t near = std::min(low, high), far = std::max(low, high);
  regions.push_back({first, near, first, std::min(near + window, length), RegionKind::causal});
  if (low <= high)
    regions.push_back({low, high, low - window, high + window, RegionKind::both});
  else
    regions.push_back({high, low, first, length, RegionKind::full});
  regions.push_back({far, length, std::max(far - window, first), length, RegionKind::inverse});
}

MaskRule make_sliding_window(std::span<const int64_t> lengths, std::span<const int64_t> values) {
  return mask_of_regions(lengths, [&](int64_t length) {
    const int64_t global = std::min(values[1], length);
    std::vector<Region> regions{{0, global, 0, length, RegionKind::full},
                                {global, length, 0, global, RegionKind::full}};
    add_band(global, length, values[0], regions);
    return regions;
  });
}

}  // namespace

NamedMask sliding_window_mask() {
  return {"sliding-window",
          "a query sees what is near to it, before and after it",
          {{"window", "how far: so many tokens on each side, and itself", 1, true},
           {"global", "number of first tokens that see everything and are seen by all", 1}},
          make_sliding_window};
}

}  // namespace gyre
