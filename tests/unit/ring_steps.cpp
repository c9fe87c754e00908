// What the steps of a causal ring compute under dual-chunk-swap: after the first one, all queries
// meet the first halves of every segment's keys, or the second halves of the queries meet all keys.

#include <gtest/gtest.h>

#include <set>

#include "attention/schedules/registry.hpp"
#include "layout_cases.hpp"

namespace gyre {
namespace {

using test::Bounds;
using test::bounds_of;
using test::full_bounds;
using Pairs = std::set<std::pair<int64_t, int64_t>>;

std::vector<step::Compute> computes_of(const RankPlan& plan) {
  std::vector<step::Compute> computes;
  for (const Step& s : plan.steps)
    if (const auto* compute = std::get_if<step::Compute>(&s)) computes.push_back(*compute);
  return computes;
}

int64_t pairs_of(const step::Compute& compute) {
  int64_t pairs = 0;
  for (const Rectangle& r : compute.rectangles) pairs += r.pairs();
  return pairs;
}

/// Local (query, key) pairs of a step; fails if a rectangle is masked.
Pairs unmasked_pairs(const step::Compute& compute) {
  Pairs pairs;
  for (const Rectangle& r : compute.rectangles) {
    EXPECT_EQ(r.mask, Mask{});
    for (int64_t i = 0; i < r.q_length; ++i)
      for (int64_t j = 0; j < r.k_length; ++j)
        EXPECT_TRUE(pairs.insert({r.q_begin.value() + i, r.k_begin.value() + j}).second);
  }
  return pairs;
}

TEST(RingSteps, TakeHalvesOfEverySegmentWithoutAMask) {
  constexpr int cp = 4;
  const Bounds bounds = full_bounds({8, 0, 24, 16});
  const Plan plan = ring_plan(dual_chunk_swap(bounds.view(), cp), MaskKind::causal);
  for (int r = 0; r < cp; ++r) {
    const auto computes = computes_of(plan.ranks[static_cast<size_t>(r)]);
    ASSERT_EQ(computes.size(), 4u);
    for (int s = 0; s < cp; ++s) {
      SCOPED_TRACE(testing::Message() << "rank " << r << ", step " << s);
      const step::Compute& compute = computes[static_cast<size_t>(s)];
      EXPECT_EQ(compute.kv_owner, (r - s + cp) % cp);
      if (s == 0) continue;
      Pairs expected;
      for (int64_t i = 0; i < bounds.view().segments(); ++i) {
        const int64_t base = bounds.view().begin(i) / cp, local = bounds.view().slot_length(i) / cp;
        for (int64_t q = s <= r ? 0 : local / 2; q < local; ++q)
          for (int64_t k = 0; k < (s <= r ? local / 2 : local); ++k)
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
      const Plan plan = ring_plan(dual_chunk_swap(bounds.view(), cp), MaskKind::causal);
      for (const RankPlan& rank : plan.ranks) {
        const auto computes = computes_of(rank);
        for (size_t s = 0; s < computes.size(); ++s)
          EXPECT_EQ(pairs_of(computes[s]),
                    s == 0 ? 10 * chunk * chunk + 3 * chunk : 10 * chunk * chunk)
              << "cp " << cp << ", chunk " << chunk << ", step " << s;
      }
    }
}

TEST(RingSteps, OfRanksWithoutTokensAreEmpty) {
  // One token in eight slots: only rank 0 has it, and only with itself.
  const Bounds bounds = bounds_of({1}, {8});
  const Plan plan = ring_plan(dual_chunk_swap(bounds.view(), 4), MaskKind::causal);
  for (size_t r = 0; r < 4; ++r)
    for (const step::Compute& compute : computes_of(plan.ranks[r]))
      EXPECT_EQ(pairs_of(compute), r == 0 && compute.kv_owner == 0 ? 1 : 0) << "rank " << r;
}

}  // namespace
}  // namespace gyre
