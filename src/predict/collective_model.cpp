#include "predict/collective_model.hpp"

#include <algorithm>

#include "core/index.hpp"

namespace gyre {
namespace {

CollectiveTime tree_time(const LinkTier& link, size_t tier, int ranks, int64_t block) {
  CollectiveTime tree{CollectiveAlgorithm::tree, 0, {}, {}};
  for (int64_t have = 1; have < ranks; have *= 2) {
    const double busy = link.seconds(static_cast<double>(std::min(have, ranks - have) * block));
    tree.busy.at(tier) += busy;
    tree.seconds += link.latency_s + busy;
  }
  tree.bytes.at(tier) = (ranks - 1) * block;
  return tree;
}

}  // namespace

const char* name_of(CollectiveAlgorithm algorithm) {
  return algorithm == CollectiveAlgorithm::ring ? "by ring" : "by tree";
}

std::vector<TierSpread> spread_of(const std::vector<LinkTier>& tiers, int64_t first, int64_t stride,
                                  int ranks) {
  std::vector<TierSpread> spread;
  for (const LinkTier& tier : tiers) {
    TierSpread& of_tier = spread.emplace_back(TierSpread{0, ranks});
    for (int64_t i = 0; i < ranks; ++of_tier.units) {
      const int64_t begin = i;
      i = ranks;
      if (&tier != &tiers.back()) {  // the first rank of the next unit
        const int64_t next_unit = round_up(first + begin * stride + 1, tier.ranks);
        i = std::min(i, ceil_div(next_unit - first, stride));
      }
      of_tier.ranks_of_one = std::min(of_tier.ranks_of_one, static_cast<int>(i - begin));
    }
    if (of_tier.units == 1) break;
  }
  return spread;
}

CollectiveTime collective_time(const std::vector<LinkTier>& tiers,
                               const std::vector<TierSpread>& spread, int ranks, int64_t block) {
  const size_t outermost = spread.size() - 1;
  if (ranks * block < ring_from_bytes) return tree_time(tiers[outermost], outermost, ranks, block);
  CollectiveTime ring;
  double latencies = 0, slowest = 0;
  int units = ranks;  // of the tier inside
  double inside = 1;  // 1 / ranks of a unit of the tier inside
  int64_t carried = 0;
  for (size_t t = 0; t <= outermost; ++t) {
    const double beyond = t == outermost ? 0 : 1.0 / spread[t].ranks_of_one;
    const double share = inside - beyond;
    latencies += (units - spread[t].units) * tiers[t].latency_s;
    const int64_t all = (ranks - 1) * block;
    ring.bytes.at(t) =
        t == outermost ? all - carried : static_cast<int64_t>(share * static_cast<double>(all));
    carried += ring.bytes.at(t);
    ring.busy.at(t) = tiers[t].seconds(static_cast<double>(ring.bytes.at(t)));
    slowest = std::max(slowest, ring.busy.at(t));
    units = spread[t].units;
    inside = beyond;
  }
  ring.seconds = latencies + slowest;
  return ring;
}

}  // namespace gyre
