// Runs of `stripe` slots in round-robin order.

#include <limits>

#include "sharding/layouts/chunks.hpp"
#include "sharding/layouts/list.hpp"

namespace gyre {
namespace {

constexpr const char* layout_name = "striped";

/// Whether slot t of the stream is on rank t mod cp.
bool striped_by_one(const Layout& layout) {
  const std::vector<SlotRun>& pieces = layout.shard(0).runs;
  return pieces.size() == 1 && pieces.front().stride == layout.cp();
}

std::optional<OwnedSlots> owned(const Layout& layout, const EqualSequences& sequences, int rank) {
  const int64_t cp = layout.cp();
  if (!striped_by_one(layout) || sequences.length % cp != 0) return std::nullopt;
  return OwnedSlots{{{GlobalToken(rank), cp, sequences.length / cp, {}}}, true};
}

/// A rank needs all rows of the others, except the last row of each higher rank.
std::optional<double> share(const Layout& layout, int64_t length) {
  if (!striped_by_one(layout)) return std::nullopt;
  return 1 - layout.cp() / (2.0 * length);
}

}  // namespace

Layout striped(const SegmentBounds& bounds, const LayoutOptions& options) {
  const int64_t cp = options.cp, stripe = options.stripe;
  check_cp(options.cp);
  check_bounds(bounds);
  constexpr int64_t longest = std::numeric_limits<int32_t>::max();
  if (stripe < 1 || stripe > longest)
    throw_usage("the stripe must be 1 to {} slots, not {}", longest, stripe);
  const int64_t rounds = ceil_div(bounds.slots(), stripe * cp);
  std::vector<std::vector<SlotRun>> pieces(cp);
  for (int64_t r = 0; r < cp; ++r) {
    std::vector<SlotRun>& mine = pieces[r];
    if (stripe == 1)
      mine.push_back({GlobalToken(r), cp, rounds, {}});
    else
      for (int64_t k = 0; k < rounds; ++k) mine.push_back(slot_run((k * cp + r) * stripe, stripe));
  }
  return make_layout(layout_name, bounds, std::move(pieces));
}

LayoutKind striped_layout() {
  return {.name = layout_name,
          .summary = "runs of equal length, round robin",
          .make = striped,
          .owned = owned,
          .needed_share = share,
          .reads = {&LayoutOptions::stripe}};
}

}  // namespace gyre
