// Balanced layouts: the deals, what they reach on packed documents, and that the joint one is never
// slower than its starts.

#include "sharding/balanced.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.hpp"
#include "layout_cases.hpp"
#include "sharding/cost.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Bounds;
using test::bounds_of;
using test::full_bounds;
using test::usage_message;
using Ints = std::vector<int32_t>;
using Costs = std::vector<int64_t>;

LayoutOptions options_of(int cp, int64_t chunk) {
  LayoutOptions options;
  options.cp = cp;
  options.chunk = chunk;
  return options;
}

TEST(BalancedChunk, SixteenChunksForEveryRankWhereThereAreSlots) {
  EXPECT_EQ(balanced_chunk(64 << 10, 8), 512);
  EXPECT_EQ(balanced_chunk(256 << 10, 32), 512);
  EXPECT_EQ(balanced_chunk(1 << 20, 8), 512);
  EXPECT_EQ(balanced_chunk((64 << 10) - 1, 8), 256);
  EXPECT_EQ(balanced_chunk(4096, 8), 32);
  EXPECT_EQ(balanced_chunk(10, 4), 1);
  EXPECT_EQ(balanced_chunk(0, 4), 1);
}

TEST(ChunkPairs, OfAnotherMask) {
  const Bounds bounds = bounds_of({3, 5}, {4, 5});
  const auto full = [](int64_t document, int64_t queries) {
    return queries * (document == 0 ? 3 : 5);
  };
  EXPECT_EQ(chunk_pairs(bounds.view(), 2, full), (Costs{6, 3, 10, 10, 5}));
}

TEST(ChunkPairs, EqualTheCountPairByPair) {
  EXPECT_TRUE(rc::check("each query's position + 1, chunk by chunk", [] {
    const Bounds bounds = test::arbitrary_bounds(1);
    const int64_t chunk = *rc::gen::inRange<int64_t>(1, 40);
    const SegmentBounds b = bounds.view();
    Costs expected(static_cast<size_t>(ceil_div(b.slots(), chunk)), 0);
    for (int64_t i = 0; i < b.segments(); ++i)
      for (int64_t p = 0; p < b.real_length(i); ++p) expected[(b.begin(i) + p) / chunk] += p + 1;
    RC_ASSERT(chunk_pairs(b, chunk) == expected);
  }));
}

TEST(DealEqualCounts, HeaviestFirstToTheLightestThatHasRoom) {
  // 9 to rank 0, 8 to 1, 2 to 1, 1 to 0; 3 chunks each would be too many.
  EXPECT_EQ(assign_equal_counts({1, 9, 2, 8}, 2), (Ints{0, 0, 1, 1}));
  // Rank 1 is full after 5 and 1, although it has less than rank 0.
  EXPECT_EQ(assign_equal_counts({20, 5, 1, 0}, 2), (Ints{0, 1, 1, 0}));
  EXPECT_EQ(assign_equal_counts({4, 4, 4, 4}, 2), (Ints{0, 1, 0, 1}));
  EXPECT_EQ(assign_equal_counts({}, 3), Ints{});
}

TEST(DealEqualCounts, HeapEqualsScan) {
  EXPECT_TRUE(rc::check("the same assignment, and equally many chunks on each rank", [] {
    const int cp = *rc::gen::inRange(1, 9);
    const auto most = *rc::gen::inRange<size_t>(0, 12);
    const auto costs = *rc::gen::container<Costs>(most * static_cast<size_t>(cp),
                                                  rc::gen::inRange<int64_t>(0, 20));
    const Ints ranks = assign_equal_counts(costs, cp);
    RC_ASSERT(ranks == assign_equal_counts_reference(costs, cp));
    for (int r = 0; r < cp; ++r)
      RC_ASSERT(static_cast<size_t>(std::count(ranks.begin(), ranks.end(), r)) == most);
  }));
}

TEST(Balanced, NeighboursAreOnePieceAndTheOrderIsThatOfTheStream) {
  // One document, chunks of 2 with costs 3 7 11 15: 15 and 3 to rank 0, 11 and 7 to rank 1.
  const Bounds bounds = full_bounds({8});
  const Layout layout = balanced(bounds.view(), options_of(2, 2));
  EXPECT_EQ(shard_index(layout, 0), (Ints{0, 1, 6, 7}));
  EXPECT_EQ(shard_index(layout, 1), (Ints{2, 3, 4, 5}));
  EXPECT_EQ(layout.shard(1).runs, (std::vector<SlotRun>{{GlobalToken(2), 1, 4, LocalToken(0)}}));
  EXPECT_TRUE(rc::check("pieces ascend and have gaps between them", [] {
    const Bounds b = test::arbitrary_bounds(1);
    const LayoutOptions options = options_of(*rc::gen::inRange(1, 9), *rc::gen::inRange(0, 9));
    for (const Layout& made : {balanced(b.view(), options), balanced_joint(b.view(), options)})
      for (const Shard& shard : made.shards)
        for (size_t i = 1; i < shard.runs.size(); ++i)
          RC_ASSERT(shard.runs[i].start > shard.runs[i - 1].start + shard.runs[i - 1].length);
  }));
}

TEST(Balanced, PadsToEquallyManyChunks) {
  const Layout layout = balanced(full_bounds({10}).view(), options_of(2, 3));
  EXPECT_EQ(layout.padded_slots, 12);
  EXPECT_EQ(layout.shard(0).slots, 6);
}

TEST(Balanced, RejectsImpossibleChunks) {
  const Bounds bounds = full_bounds({64});
  for (const auto& make : {balanced, balanced_joint}) {
    const auto message = [&](int64_t chunk) {
      return usage_message([&] { make(bounds.view(), options_of(2, chunk)); });
    };
    EXPECT_EQ(message(-3),
              "the chunk must be 1 to 2147483647 slots, or 0 for a choice by the row, not -3");
    EXPECT_EQ(
        message(int64_t{1} << 31),
        "the chunk must be 1 to 2147483647 slots, or 0 for a choice by the row, not 2147483648");
    EXPECT_EQ(message(int64_t{1} << 30),
              "2 chunks of 1073741824 slots for 2 ranks exceed the int32 range of index lists");
  }
}

TEST(BalancedJoint, RejectsImpossibleTimes) {
  const Bounds bounds = full_bounds({64});
  const auto message = [&](TimeModel time) {
    LayoutOptions options = options_of(2, 4);
    options.time = time;
    return usage_message([&] { balanced_joint(bounds.view(), options); });
  };
  EXPECT_EQ(message({-1, 1}), "the seconds of a pair must be finite and at least 0, not -1");
  EXPECT_EQ(message({1, std::numeric_limits<double>::infinity()}),
            "the seconds of a key and value token must be finite and at least 0, not inf");
  EXPECT_EQ(message({NAN, 1}), "the seconds of a pair must be finite and at least 0, not nan");
  EXPECT_EQ(message({0, 0}), "no error");
}

/// Packs of documents with a long tail and the ranks that share one.
struct Sample {
  int64_t slots;
  int cp;
};
const std::vector<Sample> samples = {{64 << 10, 8}, {256 << 10, 32}};

TEST(Balanced, WithinOnePercentOnPackedDocuments) {
  for (const Sample& sample : samples) {
    SCOPED_TRACE(sample.cp);
    double sum = 0, worst = 0;
    const std::vector<Bounds> packs = test::long_tailed_packs(10, sample.slots);
    ASSERT_EQ(packs.size(), 10U);
    for (const Bounds& pack : packs) {
      const LayoutCost cost = layout_cost(balanced(pack.view(), options_of(sample.cp, 0)));
      sum += cost.pair_ratio();
      worst = std::max(worst, cost.pair_ratio());
      // The sample is one that needs balancing.
      EXPECT_GT(layout_cost(contiguous(pack.view(), options_of(sample.cp, 0))).pair_ratio(), 1.3);
    }
    EXPECT_LE(sum / 10, 1.002);
    EXPECT_LE(worst, 1.01);
  }
}

/// Times of a pack such that the keys that the balanced layout needs take `communication` times as
/// long as its pairs, means over ranks; perfectly balanced compute takes 1.
TimeModel time_model(const Bounds& pack, const LayoutOptions& options, double communication) {
  const LayoutCost cost = layout_cost(balanced(pack.view(), options));
  double needed = 0;
  for (const RankCost& rank : cost.ranks) needed += static_cast<double>(rank.kv_needed);
  return {options.cp / static_cast<double>(cost.pairs()), communication * options.cp / needed};
}

TEST(BalancedJoint, NeedsFarFewerKeysWhenCommunicationIsSlow) {
  for (const Sample& sample : samples) {
    SCOPED_TRACE(sample.cp);
    double joint_needed = 0, joint_most = 0, needed = 0, most = 0, joint_seconds = 0, seconds = 0;
    for (const Bounds& pack : test::long_tailed_packs(2, sample.slots)) {
      LayoutOptions options = options_of(sample.cp, 512);
      options.time = time_model(pack, options, 10);
      const LayoutCost joint = layout_cost(balanced_joint(pack.view(), options));
      const LayoutCost compute = layout_cost(balanced(pack.view(), options));
      joint_needed += joint.needed_share();
      joint_most += joint.largest_needed_share();
      joint_seconds += joint.seconds(options.time);
      needed += compute.needed_share();
      most += compute.largest_needed_share();
      seconds += compute.seconds(options.time);
    }
    EXPECT_LT(joint_needed, 0.3 * needed);
    EXPECT_LT(joint_most, 0.5 * most);
    EXPECT_LT(joint_seconds, 0.5 * seconds);
  }
}

TEST(BalancedJoint, KeepsTheBalanceWithFewerKeysWhenBothTakeAsLong) {
  for (const Sample& sample : samples) {
    SCOPED_TRACE(sample.cp);
    for (const Bounds& pack : test::long_tailed_packs(2, sample.slots)) {
      LayoutOptions options = options_of(sample.cp, 512);
      options.time = time_model(pack, options, 1);
      const LayoutCost joint = layout_cost(balanced_joint(pack.view(), options));
      const LayoutCost compute = layout_cost(balanced(pack.view(), options));
      EXPECT_LE(joint.pair_ratio(), 1.01);
      EXPECT_LE(joint.seconds(options.time), 1.01);
      EXPECT_GE(compute.seconds(options.time), 1.05);
      EXPECT_LT(joint.needed_share(), compute.needed_share());
    }
  }
}

TEST(BalancedJoint, IsNeverSlowerThanBalancedOrContiguous) {
  EXPECT_TRUE(rc::check("objective of the joint assignment <= both others", [] {
    LayoutOptions options = options_of(*rc::gen::inRange(1, 9), *rc::gen::inRange(1, 9));
    Bounds bounds = test::arbitrary_bounds(1);
    // Rows of whole chunks for every rank: others are not contiguous in the same chunks.
    const int64_t rest = bounds.view().slots() % (options.chunk * options.cp);
    if (rest != 0) bounds.add(0, options.chunk * options.cp - rest);
    options.time = {*rc::gen::element(0.0, 1e-3, 1.0), *rc::gen::element(0.0, 1e-3, 1.0, 30.0)};
    const double joint = layout_cost(balanced_joint(bounds.view(), options)).seconds(options.time);
    RC_ASSERT(joint <= layout_cost(balanced(bounds.view(), options)).seconds(options.time));
    RC_ASSERT(joint <= layout_cost(contiguous(bounds.view(), options)).seconds(options.time));
  }));
}

/// The least objective of any assignment of 8 chunks over 2 ranks, 4 each.
double least_seconds(const Bounds& bounds, const LayoutOptions& options) {
  double least = HUGE_VAL;
  for (unsigned mine = 0; mine < 256; ++mine) {
    if (std::popcount(mine) != 4) continue;
    std::vector<std::vector<SlotRun>> pieces(2);
    for (int64_t c = 0; c < 8; ++c)
      pieces[(mine >> c) & 1].push_back({GlobalToken(c * options.chunk), 1, options.chunk, {}});
    least = std::min(
        least,
        layout_cost(make_layout("one", bounds.view(), std::move(pieces))).seconds(options.time));
  }
  return least;
}

TEST(BalancedJoint, FindsTheBestOfAllDealsOfAFewChunks) {
  unsigned state = 1;
  const auto below = [&state](unsigned n) {
    state = state * 1664525U + 1013904223U;
    return static_cast<int64_t>((state >> 16) % n);
  };
  int better_than_starts = 0;
  for (int i = 0; i < 60; ++i) {
    SCOPED_TRACE(i);
    LayoutOptions options = options_of(2, 16);
    Bounds bounds;
    while (bounds.view().slots() < 128) {
      const int64_t slots = std::min(1 + below(60), 128 - int64_t{bounds.view().slots()});
      bounds.add(slots - below(2), slots);
    }
    options.time = {1, std::vector<double>{1, 10, 30, 100}[i % 4]};
    const double least = least_seconds(bounds, options);
    const double joint = layout_cost(balanced_joint(bounds.view(), options)).seconds(options.time);
    EXPECT_GE(joint, least);
    EXPECT_LE(joint, 1.02 * least);
    const double start =
        std::min(layout_cost(balanced(bounds.view(), options)).seconds(options.time),
                 layout_cost(contiguous(bounds.view(), options)).seconds(options.time));
    if (least < 0.99 * start) ++better_than_starts;
  }
  EXPECT_GE(better_than_starts, 20);
}

TEST(BalancedJoint, TheSameInputGivesTheSameDeal) {
  const Bounds pack = test::long_tailed_packs(1, 16 << 10).front();
  LayoutOptions options = options_of(4, 256);
  options.time = time_model(pack, options, 3);
  const BalanceSearch first = balance_joint(pack.view(), options);
  EXPECT_EQ(first.rank_of_chunk, balance_joint(pack.view(), options).rank_of_chunk);
  EXPECT_EQ(first.chunk, 256);
  EXPECT_GT(first.cpu_seconds, 0);
  for (int r = 0; r < 4; ++r)
    EXPECT_EQ(std::count(first.rank_of_chunk.begin(), first.rank_of_chunk.end(), r), 16);
}

}  // namespace GYRE_FILE
}  // namespace gyre
