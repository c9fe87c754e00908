// Every segment is cut into cp equal consecutive parts; rank r owns part r of each.

#include "sharding/layouts/chunks.hpp"
#include "sharding/layouts/list.hpp"

namespace gyre {
namespace {

constexpr const char* layout_name = "contiguous-documents";

std::optional<OwnedSlots> owned(const Layout& layout, const EqualSequences& sequences, int rank) {
  const int64_t length = sequences.length / layout.cp();
  return OwnedSlots{{slot_run(rank * length, length)}, true};
}

/// Rank r needs all rows of ranks before it.
std::optional<double> share(const Layout&, int64_t) {
  return 0.5;
}

Layout make(const SegmentBounds& bounds, const LayoutOptions& options) {
  check_cp(options.cp);
  check_bounds(bounds);
  std::vector<std::vector<SlotRun>> pieces(options.cp);
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const int64_t length = chunk_of_segment(bounds, i, options.cp, 1);
    for (int r = 0; r < options.cp; ++r)
      pieces[r].push_back(slot_run(bounds.begin(i) + r * length, length));
  }
  return make_layout(layout_name, bounds, std::move(pieces));
}

}  // namespace

LayoutKind contiguous_documents_layout() {
  return {.name = layout_name,
          .summary = "equal consecutive parts of every segment",
          .make = make,
          .owned = owned,
          .needed_share = share,
          .chunks_per_rank = 1};
}

}  // namespace gyre
