// Ring attention (Liu et al., arXiv 2310.01889): at step i, rank r holds the KV block of rank (r -
// i) mod cp.
//
//     for i in 0 .. cp-1:
//         if i < cp-1: start sending the current block to r+1 and receiving the next from r-1
//         attend own queries to the current block
//         if i < cp-1: wait for the transfer
//
// The transfer of step i overlaps the computation of step i. Two receive slots suffice: while step
// i computes on and sends from one of them, the other receives; what it held was last used at step
// i-1, which has ended.

#include <algorithm>

#include "attention/schedules/registry.hpp"

namespace gyre {
namespace {

/// Own block at step 0, then the receive slots 1 and 2 in turn.
int slot_at(int i) {
  return i == 0 ? 0 : 1 + (i - 1) % 2;
}

}  // namespace

Plan ring_plan(const Layout& layout, MaskKind mask) {
  const int cp = layout.cp();
  const auto shard = [&](int r) -> const Shard& { return layout.shards[static_cast<size_t>(r)]; };
  Plan plan{"ring", {}};
  for (int r = 0; r < cp; ++r) {
    const auto owner = [&](int i) { return (r - i + cp) % cp; };
    RankPlan mine;
    mine.slot_tokens.assign(static_cast<size_t>(std::min(cp, 3)), 0);
    for (int i = 0; i < cp; ++i) {
      int64_t& slot = mine.slot_tokens[static_cast<size_t>(slot_at(i))];
      slot = std::max(slot, shard(owner(i)).slots);
      if (i < cp - 1)
        mine.steps.push_back(step::Exchange{i, (r + 1) % cp, (r + cp - 1) % cp, slot_at(i),
                                            slot_at(i + 1), shard(owner(i)).slots,
                                            shard(owner(i + 1)).slots});
      mine.steps.push_back(
          step::Compute{slot_at(i), owner(i), intersect(shard(r), shard(owner(i)), mask)});
      if (i < cp - 1) mine.steps.push_back(step::Wait{i});
    }
    plan.ranks.push_back(std::move(mine));
  }
  return plan;
}

}  // namespace gyre
