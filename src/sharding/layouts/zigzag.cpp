// The row is cut into 2·cp chunks; rank r owns chunks r and 2·cp-1-r.

#include "sharding/layouts/chunks.hpp"
#include "sharding/layouts/list.hpp"

namespace gyre {
namespace {

constexpr const char* layout_name = "zigzag";

std::optional<OwnedSlots> owned(const Layout& layout, const EqualSequences&, int rank) {
  return OwnedSlots{swapped_runs(rank, layout.cp(), layout.padded_slots / (2 * layout.cp()))};
}

}  // namespace

Layout zigzag(const SegmentBounds& bounds, const LayoutOptions& options) {
  check_cp(options.cp);
  check_bounds(bounds);
  const int64_t length = ceil_div(bounds.slots(), 2 * options.cp);
  std::vector<std::vector<SlotRun>> pieces(options.cp);
  for (int r = 0; r < options.cp; ++r) pieces[r] = swapped_runs(r, options.cp, length);
  return make_layout(layout_name, bounds, std::move(pieces));
}

LayoutKind zigzag_layout() {
  return {.name = layout_name,
          .summary = "chunks r and 2·cp-1-r of the whole row",
          .make = zigzag,
          .owned = owned,
          .needed_share = no_needed_share};
}

}  // namespace gyre
