// What the steps of a causal ring compute under dual-chunk-swap: after the first one, all queries
// meet the first halves of every segment's keys, or the second halves of the queries meet all keys.
// And what it moves when.

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "attention/schedules/registry.hpp"
#include "layout_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Bounds;
using test::bounds_of;
using test::full_bounds;
using Pairs = std::set<std::pair<int64_t, int64_t>>;

const HeadShape shape = {2, 1, 4, 0.5F};

Plan ring_of(const Layout& layout) {
  return plan_all(find_schedule("ring"), {&layout, shape, {}, {}});
}

/// The Compute steps of a pass, by the rank whose keys they meet.
std::map<int, step::Compute> computes_of(const RankPlan& plan, Pass pass = Pass::forward) {
  std::map<int, step::Compute> computes;
  for (const Step& s : plan.steps(pass))
    if (const auto* compute = std::get_if<step::Compute>(&s)) {
      const auto& rows = plan.arrays[compute->kv].rows;
      EXPECT_EQ(rows.size(), 1u);
      EXPECT_TRUE(computes.emplace(rows.front().rank, *compute).second);
    }
  return computes;
}

/// Local (query, key) pairs of a step; fails if a rectangle is masked.
Pairs unmasked_pairs(const step::Compute& compute) {
  Pairs pairs;
  for (const Rectangle& r : compute.rectangles) {
    EXPECT_EQ(r.mask, Mask{});
    for (int64_t i = 0; i < r.q_length; ++i)
      for (int64_t j = 0; j < r.k_length; ++j)
        EXPECT_TRUE(pairs.insert({r.q_begin + i, r.k_begin + j}).second);
  }
  return pairs;
}

TEST(RingSteps, TakeHalvesOfEverySegmentWithoutAMask) {
  constexpr int cp = 4;
  const Bounds bounds = full_bounds({8, 0, 24, 16});
  const Layout layout = dual_chunk_swap(bounds.view(), cp);
  const Plan plan = ring_of(layout);
  for (int r = 0; r < cp; ++r)
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const auto computes = computes_of(plan.ranks[r], pass);
      ASSERT_EQ(computes.size(), 4u);
      for (const auto& [owner, compute] : computes) {
        SCOPED_TRACE(testing::Message() << "rank " << r << ", keys of " << owner);
        if (owner == r) continue;
        Pairs expected;
        for (int64_t i = 0; i < bounds.view().segments(); ++i) {
          const int64_t base = bounds.view().begin(i) / cp,
                        local = bounds.view().slot_length(i) / cp;
          for (int64_t q = owner < r ? 0 : local / 2; q < local; ++q)
            for (int64_t k = 0; k < (owner < r ? local / 2 : local); ++k)
              expected.insert({base + q, base + k});
        }
        EXPECT_EQ(unmasked_pairs(compute), expected);
      }
    }
}

TEST(RingSteps, HaveTheSameAreaOnEveryRankAfterTheFirst) {
  for (int cp = 1; cp <= 8; ++cp)
    for (const int64_t chunk : {1, 3, 8}) {
      const Bounds bounds = full_bounds({2 * cp * chunk, 4 * cp * chunk});
      const Layout layout = dual_chunk_swap(bounds.view(), cp);
      for (const RankPlan& rank : ring_of(layout).ranks) {
        const auto computes = computes_of(rank);
        EXPECT_EQ(std::ssize(computes), cp);
        for (const auto& [owner, compute] : computes)
          EXPECT_EQ(total_pairs(compute.rectangles),
                    owner == rank.rank ? 10 * chunk * chunk + 3 * chunk : 10 * chunk * chunk)
              << "cp " << cp << ", chunk " << chunk << ", keys of " << owner;
      }
    }
}

TEST(RingSteps, AreTheseRectanglesOnThreeRanks) {
  // Rank 1 has chunks 1 and 4 of four tokens: all queries meet chunk 0 of rank 0's keys, and the
  // second half of the queries chunks 2 and 3 of rank 2, which are neighbours.
  const Bounds bounds = full_bounds({24});
  const Layout layout = dual_chunk_swap(bounds.view(), 3);
  const auto computes = computes_of(ring_of(layout).ranks[1]);
  EXPECT_EQ(computes.at(1).rectangles, (std::vector<Rectangle>{{0, 4, 0, 4, {true, 0, 1, 1, 0}},
                                                               {4, 4, 0, 4, {}},
                                                               {4, 4, 4, 4, {true, 0, 1, 1, 0}}}));
  EXPECT_EQ(computes.at(0).rectangles,
            (std::vector<Rectangle>{{0, 4, 0, 4, {}}, {4, 4, 0, 4, {}}}));
  EXPECT_EQ(computes.at(2).rectangles, (std::vector<Rectangle>{{4, 4, 0, 8, {}}}));
}

TEST(RingSteps, OfRanksWithoutTokensAreLeftOut) {
  // One token in eight slots: only rank 0 has it, and only with itself.
  const Bounds bounds = bounds_of({1}, {8});
  const Layout layout = dual_chunk_swap(bounds.view(), 4);
  const Plan plan = ring_of(layout);
  for (const RankPlan& rank : plan.ranks) {
    const auto computes = computes_of(rank);
    EXPECT_EQ(computes.size(), rank.rank == 0 ? 1u : 0u);
    EXPECT_EQ(count(rank, Pass::forward, shape, {}).pairs, rank.rank == 0 ? shape.heads : 0);
  }
}

TEST(RingSteps, PaddedSecondChunksGiveNoQueries) {
  // Real length 9 in 12 slots, cp = 2: rank 0's second chunk is all padding.
  const Bounds bounds = bounds_of({9}, {12});
  const Layout layout = dual_chunk_swap(bounds.view(), 2);
  const Plan plan = ring_of(layout);
  EXPECT_EQ(count(plan.ranks[0], Pass::forward, shape, {}).pairs, 6 * shape.heads);
  EXPECT_EQ(count(plan.ranks[1], Pass::forward, shape, {}).pairs, (45 - 6) * shape.heads);
  EXPECT_FALSE(computes_of(plan.ranks[0]).contains(1));
}

TEST(RingSteps, ShortDocumentsStarveRanks) {
  const auto pairs = [](int64_t length) {
    const Bounds bounds = bounds_of(std::vector<int64_t>(8, length), std::vector<int64_t>(8, 8));
    const Layout layout = dual_chunk_swap(bounds.view(), 4);
    std::vector<int64_t> counts;
    for (const RankPlan& rank : ring_of(layout).ranks)
      counts.push_back(count(rank, Pass::forward, shape, {}).pairs / shape.heads);
    return counts;
  };
  EXPECT_EQ(pairs(1), (std::vector<int64_t>{8, 0, 0, 0}));
  EXPECT_EQ(pairs(3), (std::vector<int64_t>{8, 16, 24, 0}));
  EXPECT_EQ(pairs(5), (std::vector<int64_t>{8, 16, 24, 72}));
  EXPECT_EQ(pairs(7), (std::vector<int64_t>{8, 72, 72, 72}));
}

/// Peers and names of the exchanges of a pass: "to/from what".
std::vector<std::string> exchanges_of(const RankPlan& plan, Pass pass) {
  std::vector<std::string> all;
  for (const Step& s : plan.steps(pass))
    if (const auto* x = std::get_if<step::Exchange>(&s))
      all.push_back(fmt::format("{}/{} {}", x->sends.at(0).peer, x->recvs.at(0).peer, x->what));
  return all;
}

TEST(RingSteps, TurnRoundForBackward) {
  using Names = std::vector<std::string>;
  const Bounds bounds = full_bounds({16});
  const Layout layout = dual_chunk_swap(bounds.view(), 4);
  const AttentionProblem problem = {&layout, shape, {}, {}};
  const RankPlan ring = plan_rank(find_schedule("ring"), problem, 1),
                 same_way = plan_rank(find_schedule("ring-forward"), problem, 1);
  EXPECT_EQ(exchanges_of(ring, Pass::forward), (Names{"2/0 KV", "2/0 KV", "2/0 KV"}));
  EXPECT_EQ(exchanges_of(ring, Pass::backward),
            (Names{"0/2 KV", "0/2 KV and dKV", "0/2 dKV", "0/2 dKV"}));
  EXPECT_EQ(exchanges_of(same_way, Pass::forward), exchanges_of(ring, Pass::forward));
  EXPECT_EQ(exchanges_of(same_way, Pass::backward),
            (Names{"2/0 KV", "2/0 KV and dKV", "2/0 KV and dKV", "2/0 dKV", "2/0 dKV home"}));
}

}  // namespace GYRE_FILE
}  // namespace gyre
