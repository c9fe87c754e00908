// Every segment is cut into 2·cp chunks; rank r owns chunks r and 2·cp-1-r of each.

#include "sharding/layouts/chunks.hpp"
#include "sharding/layouts/list.hpp"

namespace gyre {
namespace {

constexpr const char* layout_name = "dual-chunk-swap";

std::optional<OwnedSlots> owned(const Layout& layout, const EqualSequences& sequences, int rank) {
  return OwnedSlots{swapped_runs(rank, layout.cp(), sequences.length / (2 * layout.cp())), true};
}

/// A rank needs the first half of the rows of lower ranks and all rows of higher ranks.
std::optional<double> share(const Layout&, int64_t) {
  return 0.75;
}

}  // namespace

Layout dual_chunk_swap(const SegmentBounds& bounds, int cp) {
  check_cp(cp);
  check_bounds(bounds);
  std::vector<std::vector<SlotRun>> pieces(cp);
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const int64_t chunk = chunk_of_segment(bounds, i, cp, 2);
    for (int r = 0; r < cp; ++r)
      for (const int64_t c : swapped_chunks(r, cp))
        pieces[r].push_back(slot_run(bounds.begin(i) + c * chunk, chunk));
  }
  return make_layout(layout_name, bounds, std::move(pieces));
}

Layout dual_chunk_swap(const SegmentBounds& bounds, const LayoutOptions& options) {
  return dual_chunk_swap(bounds, options.cp);
}

LayoutKind dual_chunk_swap_layout() {
  return {.name = layout_name,
          .summary = "chunks r and 2·cp-1-r of every segment",
          .make = dual_chunk_swap,
          .owned = owned,
          .needed_share = share,
          .chunks_per_rank = 2};
}

}  // namespace gyre
