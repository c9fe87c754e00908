#include "sharding/padded_layout.hpp"

#include <limits>

#include "core/error.hpp"

namespace gyre {

PaddedLayout::PaddedLayout(std::span<const int64_t> offsets, const LayoutKind& kind,
                           const LayoutOptions& options) {
  const int64_t multiple = kind.segment_multiple(options.cp);
  int64_t slots = 0;
  for (size_t d = 0; d + 1 < offsets.size(); ++d) {
    slots += round_up(offsets[d + 1] - offsets[d], multiple);
    if (slots > std::numeric_limits<int32_t>::max())
      throw_usage("document {} ends beyond slot 2^31 - 1 when documents take multiples of {} slots",
                  d, multiple);
    real.push_back(static_cast<int32_t>(offsets[d + 1] - offsets[0]));
    padded.push_back(static_cast<int32_t>(slots));
  }
  layout = kind.make({real, padded}, options);
}

}  // namespace gyre
