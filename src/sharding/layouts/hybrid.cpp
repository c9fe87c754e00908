// Every document is shared by a group of ranks of its own, and cut there by dual-chunk-swap;
// document_groups.hpp chooses the groups.
//
//     for each document with tokens: member i of its g ranks gets chunks i and 2g-1-i of 2g
//     slots of a rank = the larger of slots / cp, rounded up, and the most tokens of a rank
//     padding, of the segments and then behind the stream: fills the ranks in order
//
// Segments may have any length, with padding or without.

#include <algorithm>

#include "sharding/document_groups.hpp"
#include "sharding/layouts/chunks.hpp"
#include "sharding/layouts/list.hpp"

namespace gyre {
namespace {

constexpr const char* layout_name = "hybrid";

using Runs = std::vector<std::vector<SlotRun>>;

/// In the order of the stream; runs that touch become one.
std::vector<SlotRun> in_order(std::vector<SlotRun> runs) {
  std::sort(runs.begin(), runs.end(),
            [](const SlotRun& a, const SlotRun& b) { return a.start < b.start; });
  std::vector<SlotRun> result;
  for (const SlotRun& run : runs)
    if (!result.empty() && result.back().start + result.back().length == run.start)
      result.back().length += run.length;
    else
      result.push_back(run);
  return result;
}

/// Fills ranks up to `most` slots each with padding.
class Filler {
 public:
  Filler(Runs& runs, const std::vector<int64_t>& tokens, int64_t most)
      : runs_(runs), tokens_(tokens), most_(most), room_(most - tokens[0]) {}
  void add(int64_t start, int64_t length) {
    while (length > 0) {
      while (room_ == 0) room_ = most_ - tokens_[++rank_];
      const int64_t taken = std::min(length, room_);
      runs_[rank_].push_back(slot_run(start, taken));
      start += taken;
      length -= taken;
      room_ -= taken;
    }
  }

 private:
  Runs& runs_;
  const std::vector<int64_t>& tokens_;
  int64_t most_, room_;
  size_t rank_ = 0;
};

/// One sequence of chunks of equal length belongs to all ranks. As many sequences as ranks, or a
/// multiple, are dealt round robin.
std::optional<OwnedSlots> owned(const Layout& layout, const EqualSequences& all, int rank) {
  const int64_t cp = layout.cp();
  if (all.count == 1 && all.length % (2 * cp) == 0)
    return OwnedSlots{swapped_runs(rank, layout.cp(), all.length / (2 * cp))};
  if (all.count % cp != 0) return std::nullopt;
  OwnedSlots slots;
  for (int64_t i = rank; i < all.count; i += cp)
    slots.runs.push_back(slot_run(i * all.length, all.length));
  return slots;
}

/// As dual-chunk-swap.
std::optional<double> share(const Layout& layout, int64_t length) {
  if (length % (2 * layout.cp()) != 0) return std::nullopt;
  return 0.75;
}

}  // namespace

Layout hybrid(const SegmentBounds& bounds, const LayoutOptions& options) {
  const DocumentGroups groups = choose_groups(bounds, options);
  Runs runs(options.cp);
  std::vector<int64_t> tokens(options.cp, 0);
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const std::vector<int32_t>& group = groups.ranks[i];
    for (int64_t member = 0; member < std::ssize(group); ++member)
      for (const TokenRange& chunk :
           chunks_of_member(bounds.real_length(i), std::ssize(group), member)) {
        runs[group[member]].push_back(slot_run(bounds.begin(i) + chunk.begin, chunk.length()));
        tokens[group[member]] += chunk.length();
      }
  }
  const int64_t most = std::max(*std::max_element(tokens.begin(), tokens.end()),
                                ceil_div(bounds.slots(), options.cp));
  Filler padding(runs, tokens, most);
  for (int64_t i = 0; i < bounds.segments(); ++i)
    padding.add(bounds.begin(i) + bounds.real_length(i),
                bounds.slot_length(i) - bounds.real_length(i));
  padding.add(bounds.slots(), options.cp * most - bounds.slots());
  for (std::vector<SlotRun>& mine : runs) mine = in_order(std::move(mine));
  return make_layout(layout_name, bounds, std::move(runs));
}

LayoutKind hybrid_layout() {
  return {.name = layout_name,
          .summary = "every document over a group of ranks of its own, chunks r and 2g-1-r",
          .make = hybrid,
          .owned = owned,
          .needed_share = share,
          .reads = {&LayoutOptions::groups, &LayoutOptions::pairs_per_key}};
}

}  // namespace gyre
