// The layout hybrid: groups of ranks for documents, how they are cut, and that nothing is sent
// beyond them.

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "attention_cases.hpp"
#include "sharding/cost.hpp"
#include "sharding/document_groups.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Bounds;
using test::bounds_of;
using test::full_bounds;
using test::usage_message;
using Groups = std::vector<std::vector<int32_t>>;
using Lengths = std::vector<int64_t>;
constexpr int64_t power_of_two = LayoutOptions::power_of_two;

LayoutOptions options_of(int cp, int64_t groups = 0) {
  LayoutOptions options;
  options.cp = cp;
  options.groups = groups;
  return options;
}

Layout hybrid(const Bounds& bounds, const LayoutOptions& options) {
  return find_layout("hybrid").make(bounds.view(), options);
}

Groups groups_of(const Bounds& bounds, const LayoutOptions& options) {
  return choose_groups(bounds.view(), options).ranks;
}

TEST(DocumentGroups, ByHand) {
  const Bounds three = full_bounds({8, 4, 4});
  EXPECT_EQ(groups_of(three, options_of(2)), (Groups{{0, 1}, {0}, {1}}));
  EXPECT_EQ(groups_of(three, options_of(2, power_of_two)), (Groups{{0}, {1}, {1}}));
  const Layout layout = hybrid(three, options_of(2));
  EXPECT_EQ(shard_index(layout, 0), (std::vector<int32_t>{0, 1, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(shard_index(layout, 1), (std::vector<int32_t>{2, 3, 4, 5, 12, 13, 14, 15}));
  EXPECT_EQ(layout.shard(0).runs.size(), 2U);
  EXPECT_EQ(layout.shard(1).runs.front().length, 4);  // its two chunks touch
  const LayoutCost cost = layout_cost(layout);
  EXPECT_EQ(cost.ranks[0].pairs, 28);
  EXPECT_EQ(cost.ranks[1].pairs, 28);
  EXPECT_EQ(cost.ranks[0].kv_needed, 4);
  EXPECT_EQ(cost.ranks[1].kv_needed, 2);
  EXPECT_DOUBLE_EQ(choose_groups(three.view(), options_of(2)).largest_load, 1);
  EXPECT_DOUBLE_EQ(choose_groups(three.view(), options_of(2, power_of_two)).largest_load,
                   36 / 28.0);
}

// Equal documents are dealt one by one, and one document belongs to all ranks.
TEST(DocumentGroups, OfEqualDocuments) {
  for (const int64_t groups : {int64_t{0}, power_of_two})
    for (int cp = 1; cp <= 9; ++cp) {
      const Groups whole = groups_of(full_bounds(Lengths(2 * cp, 7)), options_of(cp, groups));
      for (int i = 0; i < 2 * cp; ++i) EXPECT_EQ(whole[i], std::vector<int32_t>{i % cp});
      std::vector<int32_t> all(cp);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(groups_of(full_bounds({6 * cp}), options_of(cp, groups)), Groups{all});
    }
}

TEST(DocumentGroups, NoChunkIsEmpty) {
  EXPECT_EQ(groups_of(full_bounds({1}), options_of(4)), (Groups{{0}}));
  EXPECT_EQ(groups_of(full_bounds({5}), options_of(4)), (Groups{{0, 1}}));
  EXPECT_EQ(groups_of(full_bounds({7}), options_of(4, power_of_two)), (Groups{{0, 1}}));
  EXPECT_EQ(groups_of(bounds_of({0, 2}, {4, 2}), options_of(2)), (Groups{{}, {0}}));
}

TEST(DocumentGroups, ChunksOfMembersAreThoseOfDualChunkSwap) {
  for (int64_t size = 1; size <= 6; ++size)
    for (int64_t length = 0; length <= 30; ++length) {
      Lengths owner(length, -1);
      for (int64_t member = 0; member < size; ++member) {
        const auto chunks = chunks_of_member(length, size, member);
        EXPECT_LE(chunks[0].end, chunks[1].begin);
        for (const TokenRange& chunk : chunks) {
          EXPECT_TRUE(chunk.length() == length / (2 * size) ||
                      chunk.length() == ceil_div(length, 2 * size));
          for (int64_t p = chunk.begin; p < chunk.end; ++p) {
            EXPECT_EQ(owner[p], -1);
            owner[p] = member;
          }
        }
      }
      EXPECT_EQ(std::count(owner.begin(), owner.end(), -1), 0);
      if (length % (2 * size) != 0) continue;
      const auto owners =
          slot_owners(dual_chunk_swap(full_bounds({length}).view(), static_cast<int>(size)));
      for (int64_t p = 0; p < length; ++p) EXPECT_EQ(owner[p], owners[p].rank);
    }
}

/// Groups by Megatron-LM's rule: smallest power of two whose ranks hold the document.
TEST(DocumentGroups, PowersOfTwoAreConsecutiveRanksThatHoldTheDocument) {
  EXPECT_TRUE(rc::check("size, first rank", [] {
    const int cp = *rc::gen::inRange(1, 17);
    const Bounds bounds = test::arbitrary_bounds(1);
    const int64_t slots = std::max<int64_t>(1, ceil_div(bounds.view().slots(), cp));
    const Groups groups = groups_of(bounds, options_of(cp, power_of_two));
    for (int64_t i = 0; i < bounds.view().segments(); ++i) {
      const int64_t length = bounds.view().real_length(i), size = std::ssize(groups[i]);
      if (length == 0) {
        RC_ASSERT(size == 0);
        continue;
      }
      RC_ASSERT(size == cp || std::has_single_bit(static_cast<uint64_t>(size)));
      RC_ASSERT(size == 1 || (size / 2 * slots < length && 2 * size <= length));
      RC_ASSERT(size == cp || size * slots >= length || 4 * size > length);
      RC_ASSERT(groups[i].front() % size == 0);
      for (int64_t k = 0; k < size; ++k) RC_ASSERT(groups[i][k] == groups[i][0] + k);
    }
  }));
}

/// Pairs, tokens and needed keys of each rank.
std::vector<Lengths> costs_of(const Layout& layout) {
  std::vector<Lengths> costs;
  for (const RankCost& rank : layout_cost(layout).ranks)
    costs.push_back({rank.pairs, rank.real_tokens, rank.kv_needed});
  return costs;
}

TEST(Hybrid, TheOrderOfDocumentsAndEmptyOnesDoNotMatter) {
  EXPECT_TRUE(rc::check("the same work of every rank", [] {
    const auto lengths = *rc::gen::container<Lengths>(rc::gen::inRange<int64_t>(0, 40));
    LayoutOptions options =
        options_of(*rc::gen::inRange(1, 10), *rc::gen::element(int64_t{0}, power_of_two));
    if (*rc::gen::arbitrary<bool>())  // documents of different lengths with equal pairs
      options.pairs = [](int64_t, int64_t queries) { return std::min<int64_t>(queries, 9); };
    Lengths sorted = lengths;
    std::sort(sorted.begin(), sorted.end());
    sorted.erase(sorted.begin(), std::find_if(sorted.begin(), sorted.end(),
                                              [](int64_t length) { return length > 0; }));
    RC_ASSERT(costs_of(hybrid(full_bounds(lengths), options)) ==
              costs_of(hybrid(full_bounds(sorted), options)));
  }));
}

TEST(Hybrid, MembersOfAGroupHoldTheirChunks) {
  EXPECT_TRUE(rc::check("owner of every token", [] {
    const Bounds bounds = test::arbitrary_bounds(*rc::gen::inRange(1, 4));
    const LayoutOptions options =
        options_of(*rc::gen::inRange(1, 10), *rc::gen::element(int64_t{0}, power_of_two));
    const std::vector<Owner> owners = slot_owners(hybrid(bounds, options));
    const Groups groups = groups_of(bounds, options);
    for (int64_t i = 0; i < bounds.view().segments(); ++i)
      for (int64_t member = 0; member < std::ssize(groups[i]); ++member)
        for (const TokenRange& chunk :
             chunks_of_member(bounds.view().real_length(i), std::ssize(groups[i]), member))
          for (int64_t p = chunk.begin; p < chunk.end; ++p)
            RC_ASSERT(owners[bounds.view().begin(i) + p].rank == groups[i][member]);
  }));
}

TEST(Hybrid, RanksHaveAsFewSlotsAsTheirTokensAllow) {
  EXPECT_TRUE(rc::check("the most tokens of a rank, or its share of the stream", [] {
    const Bounds bounds = test::arbitrary_bounds(*rc::gen::inRange(1, 4));
    const LayoutOptions options =
        options_of(*rc::gen::inRange(1, 10), *rc::gen::element(int64_t{0}, power_of_two));
    const Layout layout = hybrid(bounds, options);
    int64_t most = ceil_div(bounds.view().slots(), options.cp);
    for (const RankCost& rank : layout_cost(layout).ranks) most = std::max(most, rank.real_tokens);
    RC_ASSERT(layout.padded_slots == most * options.cp);
  }));
}

TEST(Hybrid, IsEvenWithFewerKeysThanBalancedOnPackedDocuments) {
  for (const auto& [slots, cp] : {std::pair{64 << 10, 8}, std::pair{256 << 10, 32}}) {
    SCOPED_TRACE(cp);
    double ratio = 0, padded = 0, needed = 0, of_balanced = 0, uneven = 0;
    const std::vector<Bounds> packs = test::long_tailed_packs(10, slots);
    for (const Bounds& pack : packs) {
      const Layout layout = hybrid(pack, options_of(cp));
      const LayoutCost cost = layout_cost(layout);
      ratio += cost.pair_ratio() / 10;
      padded += static_cast<double>(layout.padded_slots) / slots / 10;
      needed += cost.needed_share();
      of_balanced += layout_cost(balanced(pack.view(), options_of(cp))).needed_share();
      uneven += layout_cost(hybrid(pack, options_of(cp, power_of_two))).pair_ratio() / 10;
    }
    EXPECT_LE(ratio, 1.01);
    EXPECT_LE(padded, 1.01);
    EXPECT_LT(needed, 0.85 * of_balanced);
    EXPECT_GT(uneven, 1.5);  // the rule counts tokens only
  }
}

/// Score of groups by definition, with unit times of a pair and `seconds` of a needed key.
double score_of(const Lengths& lengths, const std::vector<unsigned>& groups, int cp,
                double seconds) {
  double pairs = 0, tokens = 0, needed_by_all = 0, needed_by_groups = 0;
  std::vector<double> of_pairs(cp), of_tokens(cp), of_needed(cp);
  for (size_t k = 0; k < lengths.size(); ++k) {
    const auto n = static_cast<double>(lengths[k]);
    const int size = std::popcount(groups[k]);
    pairs += n * (n + 1) / 2;
    tokens += n;
    needed_by_all += 0.75 * n * (cp - 1);
    needed_by_groups += 0.75 * n * (size - 1);
    for (int r = 0, member = 0; r < cp; ++r) {
      if ((groups[k] >> r & 1) == 0) continue;
      int64_t last = 0, held = 0;
      for (int64_t p = 0; p < lengths[k]; ++p) {
        int64_t chunk = 0;
        while ((chunk + 1) * lengths[k] / (2 * size) <= p) ++chunk;
        if (std::min<int64_t>(chunk, 2 * size - 1 - chunk) != member) continue;
        of_pairs[r] += static_cast<double>(p + 1);
        last = p + 1;
        ++held;
      }
      of_tokens[r] += static_cast<double>(held);
      of_needed[r] += static_cast<double>(last - held);
      ++member;
    }
  }
  double largest = 0;
  for (int r = 0; r < cp; ++r)
    largest = std::max({largest, of_pairs[r] * cp / pairs, of_tokens[r] / std::ceil(tokens / cp),
                        of_needed[r] * seconds * cp / pairs});
  return largest + 0.1 * needed_by_groups / needed_by_all;
}

TEST(DocumentGroups, AreNearTheBestOfAllGroups) {
  constexpr int cp = 3, documents = 4;
  unsigned state = 1;
  const auto below = [&state](unsigned n) {
    state = state * 1664525U + 1013904223U;
    return static_cast<int64_t>((state >> 16) % n);
  };
  double sum = 0;
  for (int i = 0; i < 30; ++i) {
    SCOPED_TRACE(i);
    Lengths lengths;
    for (int k = 0; k < documents; ++k) lengths.push_back(6 + below(k == 0 ? 60 : 20));
    LayoutOptions options = options_of(cp);
    options.time = {1, i % 2 == 0 ? 1.0 : 10.0};
    const DocumentGroups chosen = choose_groups(full_bounds(lengths).view(), options);
    std::vector<unsigned> mine(documents, 0);
    for (int k = 0; k < documents; ++k)
      for (const int32_t rank : chosen.ranks[static_cast<size_t>(k)])
        mine[static_cast<size_t>(k)] |= 1U << rank;
    double best = HUGE_VAL;
    for (unsigned all = 0; all < 7 * 7 * 7 * 7; ++all)
      best = std::min(
          best, score_of(lengths, {all % 7 + 1, all / 7 % 7 + 1, all / 49 % 7 + 1, all / 343 + 1},
                         cp, options.time.seconds_per_kv_token));
    const double score = score_of(lengths, mine, cp, options.time.seconds_per_kv_token);
    EXPECT_LE(score, 1.2 * best);
    sum += score / best;
  }
  EXPECT_LE(sum / 30, 1.05);
}

TEST(DocumentGroups, OfOneRankWhereKeysTakeLongest) {
  LayoutOptions options = options_of(2);
  options.time = {1, 10};  // 4 keys for half of the first document take longer than its other half
  EXPECT_EQ(groups_of(full_bounds({8, 4, 4}), options), (Groups{{0}, {1}, {1}}));
  options = options_of(2);
  EXPECT_EQ(groups_of(full_bounds({8, 4, 4}), options)[0].size(), 2U);
  options.pairs_per_key = 10;
  EXPECT_EQ(groups_of(full_bounds({8, 4, 4}), options)[0].size(), 1U);
}

TEST(Hybrid, SlowCommunicationMakesGroupsSmaller) {
  for (const Bounds& pack : test::long_tailed_packs(3, 64 << 10)) {
    LayoutOptions options = options_of(8);
    const LayoutCost usual = layout_cost(hybrid(pack, options));
    options.time = {1, 1e4};
    const LayoutCost slow = layout_cost(hybrid(pack, options));
    EXPECT_LT(slow.seconds(options.time), 0.9 * usual.seconds(options.time));
    EXPECT_LT(slow.needed_share(), usual.needed_share());
  }
}

TEST(DocumentGroups, WeighByThePairsOfTheMask) {
  // Only the second document has pairs.
  LayoutOptions options = options_of(4);
  options.time.seconds_per_kv_token = 0;
  options.pairs = [](int64_t document, int64_t queries) { return document == 1 ? queries : 0; };
  const Groups groups = groups_of(full_bounds({16, 16, 16, 16, 16}), options);
  EXPECT_EQ(groups[1], (std::vector<int32_t>{0, 1, 2, 3}));
  for (const size_t other : {0, 2, 3, 4}) EXPECT_EQ(groups[other].size(), 1U);
}

TEST(DocumentGroups, RejectImpossibleTimes) {
  LayoutOptions options = options_of(2);
  options.time = {1, -1};
  EXPECT_EQ(usage_message([&] { groups_of(full_bounds({64}), options); }),
            "the seconds of a key and value token must be finite and at least 0, not -1");
}

/// The document of local slot `row` of a rank.
int64_t document_of(const Layout& layout, int rank, int64_t row) {
  for (const Fragment& f : layout.shard(rank).fragments)
    if (row >= f.local_begin.value() && row < f.local_begin.value() + f.length) return f.segment;
  ADD_FAILURE() << "row " << row << " of rank " << rank << " is padding";
  return 0;
}

TEST(Hybrid, GroupCastSendsNothingBeyondTheGroupsOfDocuments) {
  int sent = 0;
  for (const int cp : {2, 3, 8})
    for (const Bounds& pack : test::long_tailed_packs(2, 4096)) {
      test::AttentionCase c;
      c.layout = test::layout_case("hybrid", pack, cp);
      c.heads = test::shape_of(2, 1);
      const Groups groups = groups_of(pack, options_of(cp));
      for (int r = 0; r < cp; ++r) {
        const RankPlan plan = plan_rank(find_schedule("group-cast"), c.problem(), r);
        for (const Pass pass : {Pass::forward, Pass::backward})
          for (const Step& s : plan.steps(pass)) {
            const auto* exchange = std::get_if<step::Exchange>(&s);
            if (exchange == nullptr) continue;
            for (const Message& message : exchange->sends)
              for (const Slice& slice : message.slices) {
                int64_t row = 0;  // of the array
                for (const RankRows& rows : plan.arrays[slice.array].rows)
                  for (int64_t k = 0; k < rows.length; ++k, ++row) {
                    if (row < slice.row || row >= slice.row + slice.rows) continue;
                    const auto& group =
                        groups[document_of(c.layout.layout, rows.rank, rows.begin.value() + k)];
                    ASSERT_TRUE(std::ranges::count(group, r) == 1 &&
                                std::ranges::count(group, message.peer) == 1);
                    ++sent;
                  }
              }
          }
      }
    }
  EXPECT_GT(sent, 1000);
  // Documents of one rank each.
  test::AttentionCase c;
  c.layout = test::layout_case("hybrid", full_bounds(Lengths(12, 10)), 4);
  c.heads = test::shape_of(2, 1);
  for (int r = 0; r < 4; ++r) {
    const RankPlan plan = plan_rank(find_schedule("group-cast"), c.problem(), r);
    for (const Pass pass : {Pass::forward, Pass::backward})
      EXPECT_EQ(count(plan, pass, c.heads, {}).messages, 0);
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
