// Rank r owns the r-th of cp equal consecutive parts of the row.

#include "sharding/layouts/chunks.hpp"
#include "sharding/layouts/list.hpp"

namespace gyre {
namespace {

constexpr const char* layout_name = "contiguous";

std::optional<OwnedSlots> owned(const Layout& layout, const EqualSequences&, int rank) {
  const int64_t length = layout.slots_of_rank();
  return OwnedSlots{{slot_run(rank * length, length)}};
}

/// Rank r needs all rows of ranks before it.
std::optional<double> share(const Layout&, int64_t) {
  return 0.5;
}

}  // namespace

Layout contiguous(const SegmentBounds& bounds, const LayoutOptions& options) {
  check_cp(options.cp);
  check_bounds(bounds);
  const int64_t length = ceil_div(bounds.slots(), options.cp);
  std::vector<std::vector<SlotRun>> pieces(options.cp);
  for (int r = 0; r < options.cp; ++r) pieces[r] = {slot_run(r * length, length)};
  return make_layout(layout_name, bounds, std::move(pieces));
}

LayoutKind contiguous_layout() {
  return {.name = layout_name,
          .summary = "equal consecutive parts of the row",
          .make = contiguous,
          .owned = owned,
          .needed_share = share};
}

}  // namespace gyre
