// What layouts cost: closed forms, and brute force over all pairs of queries and keys.

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <numeric>
#include <set>

#include "layout_cases.hpp"
#include "sharding/cost.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Bounds;
using test::bounds_of;
using test::full_bounds;
using Counts = std::vector<int64_t>;

LayoutOptions options_of(int cp) {
  LayoutOptions options;
  options.cp = cp;
  return options;
}

Counts pairs_of(const Layout& layout) {
  Counts pairs;
  for (const RankCost& rank : layout_cost(layout).ranks) pairs.push_back(rank.pairs);
  return pairs;
}
Counts needed_of(const Layout& layout) {
  Counts needed;
  for (const RankCost& rank : layout_cost(layout).ranks) needed.push_back(rank.kv_needed);
  return needed;
}

TEST(Pairs, WhereARowIsCutMatters) {
  const Bounds one = full_bounds({16});
  EXPECT_EQ(pairs_of(contiguous(one.view(), options_of(4))), (Counts{10, 26, 42, 58}));
  EXPECT_EQ(pairs_of(zigzag(one.view(), options_of(4))), (Counts{34, 34, 34, 34}));
  EXPECT_EQ(pairs_of(dual_chunk_swap(one.view(), 4)), (Counts{34, 34, 34, 34}));
  const Bounds two = full_bounds({4, 12});
  EXPECT_EQ(pairs_of(contiguous(two.view(), options_of(2))), (Counts{20, 68}));
  EXPECT_EQ(pairs_of(zigzag(two.view(), options_of(2))), (Counts{52, 36}));
  EXPECT_EQ(pairs_of(dual_chunk_swap(two.view(), 2)), (Counts{44, 44}));
  const Bounds five = full_bounds({32, 8, 8, 8, 8});
  EXPECT_EQ(pairs_of(contiguous(five.view(), options_of(4))), (Counts{136, 392, 72, 72}));
  EXPECT_EQ(pairs_of(zigzag(five.view(), options_of(4))), (Counts{72, 136, 200, 264}));
  EXPECT_EQ(pairs_of(dual_chunk_swap(five.view(), 4)), (Counts{168, 168, 168, 168}));
}

TEST(Pairs, ShortDocumentsStarveSomeRanks) {
  const auto eight = [](int64_t length) {
    return pairs_of(dual_chunk_swap(bounds_of(Counts(8, length), Counts(8, 8)).view(), 4));
  };
  EXPECT_EQ(eight(1), (Counts{8, 0, 0, 0}));
  EXPECT_EQ(eight(3), (Counts{8, 16, 24, 0}));
  EXPECT_EQ(eight(5), (Counts{8, 16, 24, 72}));
  EXPECT_EQ(eight(7), (Counts{8, 72, 72, 72}));
}

TEST(Pairs, ACutAcrossSegmentsLosesTheBalanceOfEach) {
  // Each segment in the order of its ranks' chunks, 0 3 1 2 | 4-6 13-15 7-12, and then halves.
  const auto run = [](int64_t start, int64_t length) {
    return SlotRun{GlobalToken(start), 1, length, {}};
  };
  const Bounds bounds = full_bounds({4, 12});
  const Layout halves = make_layout(
      "halves", bounds.view(),
      {{run(0, 1), run(3, 1), run(1, 2), run(4, 3), run(13, 1)}, {run(14, 2), run(7, 6)}});
  EXPECT_EQ(pairs_of(halves), (Counts{26, 62}));
}

TEST(Pairs, ContiguousWorkOnRealTokensOfAPaddedRow) {
  const Bounds bounds = full_bounds({10});
  EXPECT_EQ(pairs_of(contiguous(bounds.view(), options_of(4))), (Counts{6, 15, 24, 10}));
}

TEST(Pairs, ClosedFormsForOneSequence) {
  for (int cp = 1; cp <= 6; ++cp)
    for (int64_t chunk = 1; chunk <= 5; ++chunk) {
      SCOPED_TRACE("cp " + std::to_string(cp) + " chunk " + std::to_string(chunk));
      const int64_t local = 2 * chunk;
      const Bounds bounds = full_bounds({local * cp});
      Counts consecutive, strided;
      for (int r = 0; r < cp; ++r) {
        consecutive.push_back(r * local * local + local * (local + 1) / 2);
        strided.push_back((r + 1) * local * (local + 1) / 2 +
                          (cp - 1 - r) * local * (local - 1) / 2);
      }
      EXPECT_EQ(pairs_of(contiguous(bounds.view(), options_of(cp))), consecutive);
      EXPECT_EQ(pairs_of(striped(bounds.view(), options_of(cp))), strided);
      EXPECT_EQ(
          pairs_of(dual_chunk_swap(bounds.view(), cp)),
          Counts(static_cast<size_t>(cp), chunk * chunk * (2 * cp - 1) + chunk * (chunk + 1)));
    }
}

TEST(Pairs, RatioOfTheSlowestRankToTheMean) {
  const Bounds bounds = full_bounds({int64_t{1} << 20});
  for (const int cp : {2, 4, 16}) {
    EXPECT_NEAR(layout_cost(contiguous(bounds.view(), options_of(cp))).pair_ratio(), 2 - 1.0 / cp,
                1e-5);
    EXPECT_DOUBLE_EQ(layout_cost(dual_chunk_swap(bounds.view(), cp)).pair_ratio(), 1);
  }
}

TEST(KvNeeded, ShareOfTheRingForOneSequence) {
  for (int cp = 2; cp <= 8; ++cp) {
    SCOPED_TRACE(cp);
    const int64_t local = 6;
    const Bounds bounds = full_bounds({local * cp});
    const LayoutCost consecutive = layout_cost(contiguous(bounds.view(), options_of(cp)));
    EXPECT_DOUBLE_EQ(consecutive.needed_share(), 0.5);
    EXPECT_DOUBLE_EQ(consecutive.largest_needed_share(), 1);
    const LayoutCost swapped = layout_cost(dual_chunk_swap(bounds.view(), cp));
    EXPECT_DOUBLE_EQ(swapped.needed_share(), 0.75);
    EXPECT_DOUBLE_EQ(swapped.largest_needed_share(), 1);
    // A rank lacks only the keys after its last token.
    const LayoutCost strided = layout_cost(striped(bounds.view(), options_of(cp)));
    EXPECT_DOUBLE_EQ(strided.needed_share(), 1 - 1.0 / (2.0 * local));
    EXPECT_DOUBLE_EQ(strided.largest_needed_share(), 1);
  }
}

TEST(KvNeeded, TwoDocumentsByHand) {
  // Documents a b c d e . and x y, chunks of 2 slots on ranks 0, 1, 0, 1 (zigzag of the reverse).
  const Bounds bounds = bounds_of({5, 2}, {6, 2});
  const Layout layout = make_layout("alternating", bounds.view(),
                                    {{{GlobalToken(0), 1, 2, {}}, {GlobalToken(4), 1, 2, {}}},
                                     {{GlobalToken(2), 1, 2, {}}, {GlobalToken(6), 1, 2, {}}}});
  EXPECT_EQ(needed_of(layout), (Counts{2, 2}));  // rank 0: c d, rank 1: a b
  EXPECT_EQ(kv_traffic(layout), (std::vector<Counts>{{0, 2}, {2, 0}}));
  const LayoutCost cost = layout_cost(layout);
  EXPECT_EQ(cost.ranks[0].real_tokens, 3);
  EXPECT_EQ(cost.ranks[1].real_tokens, 4);
  EXPECT_EQ(cost.pieces, 4);
  EXPECT_EQ(cost.slots, 4);
  EXPECT_EQ(cost.pairs(), 15 + 3);
  EXPECT_EQ(cost.max_pairs(), 10);  // 3 + 4 and 1 + 2, against 1 + 2 and 5
  EXPECT_DOUBLE_EQ(cost.pair_ratio(), 10.0 / 9);
}

TEST(LayoutCost, SecondsAreOfTheSlowestRankAndItsSlowerPart) {
  LayoutCost cost;
  cost.ranks = {{0, 100, 7}, {0, 80, 9}};
  EXPECT_DOUBLE_EQ(cost.seconds({1, 1}), 100);
  EXPECT_DOUBLE_EQ(cost.seconds({1, 20}), 180);
  EXPECT_DOUBLE_EQ(cost.seconds({0, 0}), 0);
}

TEST(LayoutCost, NothingToDo) {
  const Bounds none, padding = bounds_of({0}, {8});
  for (const LayoutKind& kind : layout_kinds())
    for (const Bounds& bounds : {none, padding}) {
      SCOPED_TRACE(kind.name);
      const LayoutCost cost = layout_cost(kind.make(bounds.view(), options_of(2)));
      EXPECT_EQ(cost.pairs(), 0);
      EXPECT_EQ(cost.pieces, 0);
      EXPECT_EQ(cost.pair_ratio(), 1);
      EXPECT_EQ(cost.needed_share(), 0);
      EXPECT_EQ(cost.largest_needed_share(), 0);
    }
  const LayoutCost alone = layout_cost(dual_chunk_swap(full_bounds({8}).view(), 1));
  EXPECT_EQ(alone.ranks[0].kv_needed, 0);
  EXPECT_EQ(alone.needed_share(), 0);
  EXPECT_EQ(alone.pair_ratio(), 1);
}

/// Real tokens, pairs and wanted keys of every rank, found pair by pair.
struct BruteForce {
  Counts tokens, pairs;
  std::vector<Counts> traffic;
  BruteForce(const SegmentBounds& bounds, const Layout& layout)
      : tokens(layout.shards.size(), 0),
        pairs(layout.shards.size(), 0),
        traffic(layout.shards.size(), Counts(layout.shards.size(), 0)) {
    const std::vector<Owner> owners = slot_owners(layout);
    std::vector<std::set<int64_t>> wanted(layout.shards.size());
    for (int64_t i = 0; i < bounds.segments(); ++i)
      for (int64_t q = bounds.begin(i); q < bounds.begin(i) + bounds.real_length(i); ++q) {
        const auto rank = static_cast<size_t>(owners[q].rank);
        ++tokens[rank];
        for (int64_t k = bounds.begin(i); k <= q; ++k) {
          ++pairs[rank];
          const auto owner = static_cast<size_t>(owners[k].rank);
          if (owner != rank && wanted[rank].insert(k).second) ++traffic[rank][owner];
        }
      }
  }
};

TEST(EveryLayout, CostsEqualBruteForceOverAllPairs) {
  EXPECT_TRUE(rc::check("tokens, pairs, needed keys and traffic", [] {
    const test::LayoutCase c = test::arbitrary_layout();
    RC_TAG(c.kind);
    const BruteForce expected(c.bounds.view(), c.layout);
    const LayoutCost cost = layout_cost(c.layout);
    const std::vector<Counts> traffic = kv_traffic(c.layout);
    RC_ASSERT(traffic == expected.traffic);
    RC_ASSERT(std::ssize(cost.ranks) == c.layout.cp());
    int64_t pieces = 0;
    for (size_t r = 0; r < cost.ranks.size(); ++r) {
      RC_ASSERT(cost.ranks[r].real_tokens == expected.tokens[r]);
      RC_ASSERT(cost.ranks[r].pairs == expected.pairs[r]);
      RC_ASSERT(cost.ranks[r].kv_needed ==
                std::accumulate(traffic[r].begin(), traffic[r].end(), int64_t{0}));
      pieces += std::ssize(c.layout.shards[r].fragments);
    }
    RC_ASSERT(cost.pieces == pieces);
    RC_ASSERT(cost.slots * c.layout.cp() == c.layout.padded_slots);
  }));
}

}  // namespace GYRE_FILE
}  // namespace gyre
