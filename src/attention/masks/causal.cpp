#include "attention/masks/list.hpp"
#include "core/error.hpp"

namespace gyre {
namespace {

/// With `keep`, all later queries see the tokens 0 .. keep - 1; the others are seen in windows.
MaskRule make_causal(std::span<const int64_t> lengths, std::span<const int64_t> values) {
  const int64_t window = values[0], keep = values[1];
  if (keep > 0 && window == 0)
    throw_usage(
        "--mask causal,keep={}: without a window all tokens are kept; wanted: "
        "causal,window=N,keep={}",
        keep, keep);
  if (keep == 0) return {MaskKind::causal, window};
  return mask_of_regions(lengths, [&](int64_t length) {
    const int64_t kept = std::min(keep, length);
    return std::vector<Region>{{0, kept, 0, kept, RegionKind::causal},
                               {kept, length, 0, kept, RegionKind::full},
                               {kept, length, kept, length, RegionKind::causal, window}};
  });
}

}  // namespace

NamedMask causal_mask() {
  return {"causal",
          "a query sees itself and what is before it",
          {{"window", "a query sees only itself and the window - 1 tokens before it", 1},
           {"keep", "with a window: number of first tokens that are always visible", 1}},
          make_causal};
}

}  // namespace gyre
