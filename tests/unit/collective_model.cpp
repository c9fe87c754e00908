// Durations of a library's collectives on machines of several tiers.

#include "predict/collective_model.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <map>

namespace gyre {
namespace GYRE_FILE {

LinkTier tier(const std::string& name, int ranks, double bytes_per_s, double latency_s) {
  LinkTier result;
  result.name = name;
  result.ranks = ranks;
  result.bytes_per_s = bytes_per_s;
  result.latency_s = latency_s;
  return result;
}

CollectiveTime time_of(const std::vector<LinkTier>& tiers, int ranks, int64_t block,
                       int64_t stride = 1) {
  return collective_time(tiers, spread_of(tiers, 0, stride, ranks), ranks, block);
}

constexpr int64_t block = 1 << 20;

TEST(CollectiveModel, ARingSendsOverTheLinksOfAllRanksOfANode) {
  // Two and eight nodes of 8; first the network is slower, then the node.
  for (const int nodes : {2, 8})
    for (const double network : {1e9, 1e11}) {
      const std::vector<LinkTier> tiers = {tier("node", 8, 2e10, 1e-6),
                                           tier("switch", 0, network, 1e-5)};
      const int ranks = 8 * nodes;
      const double bytes = (ranks - 1.0) * block;
      const CollectiveTime time = time_of(tiers, ranks, block);
      EXPECT_EQ(time.algorithm, CollectiveAlgorithm::ring);
      EXPECT_NEAR(time.seconds,
                  (ranks - nodes) * 1e-6 + (nodes - 1) * 1e-5 +
                      std::max(bytes * 7 / 8 / 2e10, bytes / 8 / network),
                  1e-12);
      EXPECT_EQ(time.bytes[0] + time.bytes[1], (ranks - 1) * block);
      EXPECT_EQ(time.bytes[1], (ranks - 1) * block / 8);
      EXPECT_NEAR(time.busy[1], bytes / 8 / network, 1e-12);
    }
}

TEST(CollectiveModel, ARankThatIsAloneInItsNodeSendsEverything) {
  const std::vector<LinkTier> tiers = {tier("node", 8, 2e10, 1e-6), tier("switch", 0, 1e9, 1e-5)};
  // Neighbours of the group are 8 ranks apart; then the last node has one of 9 ranks.
  const double all = 8e-9 * block;
  EXPECT_NEAR(time_of(tiers, 9, block, 8).seconds, 8 * 1e-5 + all, 1e-12);
  EXPECT_NEAR(time_of(tiers, 9, block).seconds, 7 * 1e-6 + 1e-5 + all, 1e-12);
}

TEST(CollectiveModel, TheSlowestOfThreeTiersDecides) {
  std::vector<LinkTier> tiers = {tier("node", 2, 8e9, 0), tier("rack", 8, 4e9, 0),
                                 tier("switch", 0, 1e9, 0)};
  const double bytes = 15.0 * block;  // of it a half, 3/8 and 1/8
  EXPECT_NEAR(time_of(tiers, 16, block).seconds, bytes / 8 / 1e9, 1e-12);
  tiers[1].bytes_per_s = 2e9;
  EXPECT_NEAR(time_of(tiers, 16, block).seconds, bytes * 3 / 8 / 2e9, 1e-12);
  tiers[0].bytes_per_s = 1e9;
  EXPECT_NEAR(time_of(tiers, 16, block).seconds, bytes / 2 / 1e9, 1e-12);
}

TEST(CollectiveModel, InsideANodeTheNetworkDoesNotMatter) {
  const std::vector<LinkTier> tiers = {tier("node", 8, 2e10, 1e-6), tier("switch", 0, 1e3, 1)};
  const CollectiveTime time = time_of(tiers, 8, block);
  EXPECT_NEAR(time.seconds, 7 * 1e-6 + 7.0 * block / 2e10, 1e-12);
  EXPECT_EQ(time.bytes[1], 0);
}

RC_GTEST_PROP(CollectiveModel, SpreadsCountTheRanksOfEachUnit, ()) {
  const int inner = *rc::gen::inRange(1, 6), outer = inner * *rc::gen::inRange(1, 5);
  const std::vector<LinkTier> tiers = {tier("node", inner, 1, 0), tier("rack", outer, 1, 0),
                                       tier("switch", 0, 1, 0)};
  const int64_t first = *rc::gen::inRange(0, 40), stride = *rc::gen::inRange(1, 9);
  const int ranks = *rc::gen::inRange(2, 30);
  const std::vector<TierSpread> spread = spread_of(tiers, first, stride, ranks);
  for (size_t t = 0; t < 3; ++t) {
    std::map<int64_t, int> units;
    for (int i = 0; i < ranks; ++i) ++units[t == 2 ? 0 : (first + i * stride) / tiers[t].ranks];
    RC_ASSERT(spread[t].units == static_cast<int>(units.size()));
    int least = ranks;
    for (const auto& [unit, members] : units) least = std::min(least, members);
    RC_ASSERT(spread[t].ranks_of_one == least);
    if (units.size() == 1) {
      RC_ASSERT(spread.size() == t + 1);
      break;
    }
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
