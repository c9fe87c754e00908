// Layouts: index maps and their inverses, fragments, padding, rejection of broken boundaries.

#include "sharding/layout.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/error.hpp"
#include "layout_cases.hpp"
#include "sharding/layouts.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Bounds;
using test::bounds_of;
using test::usage_message;
using Ints = std::vector<int32_t>;
using Lengths = std::vector<int64_t>;

LayoutOptions options_of(int cp) {
  LayoutOptions options;
  options.cp = cp;
  return options;
}

/// The index lists of all ranks.
std::vector<Ints> indices(const Layout& layout) {
  std::vector<Ints> result;
  for (int r = 0; r < layout.cp(); ++r) result.push_back(shard_index(layout, r));
  return result;
}
/// Real tokens of each rank, all segments together.
Lengths real_tokens(const Layout& layout) {
  Lengths result;
  for (const Shard& shard : layout.shards) {
    int64_t sum = 0;
    for (const Fragment& fragment : shard.fragments) sum += fragment.length;
    result.push_back(sum);
  }
  return result;
}
Lengths real_tokens(const Lengths& real, const Lengths& slots, int cp) {
  return real_tokens(dual_chunk_swap(bounds_of(real, slots).view(), cp));
}

TEST(Division, RoundsDownAndUpForNumbersOfAnySign) {
  for (int64_t a = -12; a <= 12; ++a)
    for (int64_t b = 1; b <= 5; ++b) {
      EXPECT_LE(b * floor_div(a, b), a);
      EXPECT_GT(b * (floor_div(a, b) + 1), a);
      EXPECT_GE(b * ceil_div(a, b), a);
      EXPECT_LT(b * (ceil_div(a, b) - 1), a);
    }
}

TEST(DualChunkSwap, SlotsOfEveryRank) {
  struct Case {
    Ints bounds;
    std::vector<Ints> ranks;
  };
  for (const Case& c : std::vector<Case>{
           {{0, 12}, {{0, 1, 2, 9, 10, 11}, {3, 4, 5, 6, 7, 8}}},
           {{0, 16}, {{0, 1, 14, 15}, {2, 3, 12, 13}, {4, 5, 10, 11}, {6, 7, 8, 9}}},
           {{0, 6}, {{0, 5}, {1, 4}, {2, 3}}},  // the smallest slot has chunks of one token
           {{0, 2, 8}, {{0, 1, 2, 3, 4, 5, 6, 7}}},
           {{0, 8, 12}, {{0, 1, 6, 7, 8, 11}, {2, 3, 4, 5, 9, 10}}},
           {{0, 8, 16}, {{0, 1, 6, 7, 8, 9, 14, 15}, {2, 3, 4, 5, 10, 11, 12, 13}}},
           {{0, 8, 16, 24, 40},
            {{0, 7, 8, 15, 16, 23, 24, 25, 38, 39},
             {1, 6, 9, 14, 17, 22, 26, 27, 36, 37},
             {2, 5, 10, 13, 18, 21, 28, 29, 34, 35},
             {3, 4, 11, 12, 19, 20, 30, 31, 32, 33}}},
           // Empty segments and empty streams.
           {{0, 4, 12, 12, 20},
            {{0, 3, 4, 5, 10, 11, 12, 13, 18, 19}, {1, 2, 6, 7, 8, 9, 14, 15, 16, 17}}},
           {{0, 0, 8}, {{0, 1, 6, 7}, {2, 3, 4, 5}}},
           {{0, 0}, {{}, {}, {}}},
           {{0}, {{}, {}}}})
    EXPECT_EQ(indices(dual_chunk_swap({c.bounds, c.bounds}, static_cast<int>(c.ranks.size()))),
              c.ranks);
}

TEST(DualChunkSwap, SegmentsOfPaddingAreDealtLikeOthers) {
  const Bounds bounds = bounds_of({0, 4}, {8, 4});
  const Layout layout = dual_chunk_swap(bounds.view(), 2);
  EXPECT_EQ(indices(layout), (std::vector<Ints>{{0, 1, 6, 7, 8, 11}, {2, 3, 4, 5, 9, 10}}));
  EXPECT_EQ(real_tokens(layout), (Lengths{2, 2}));
  EXPECT_EQ(layout.shard(0).fragments.front(), (Fragment{1, DocPosition(0), 1, 1, LocalToken(4)}));
}

TEST(DualChunkSwap, OrdersOfChunksBetweenRanksAndSequence) {
  const Ints bounds = {0, 8};
  const Layout layout = dual_chunk_swap({bounds, bounds}, 4);
  Ints scatter, gather;
  for (const Ints& index : indices(layout))
    scatter.insert(scatter.end(), index.begin(), index.end());
  for (const Owner& owner : slot_owners(layout)) gather.push_back(2 * owner.rank + owner.local);
  EXPECT_EQ(scatter, (Ints{0, 7, 1, 6, 2, 5, 3, 4}));
  EXPECT_EQ(gather, (Ints{0, 2, 4, 6, 7, 5, 3, 1}));
}

/// Real tokens of each segment on `rank`: [segments].
Lengths local_real_lengths(const Layout& layout, int rank, int64_t segments) {
  Lengths lengths(static_cast<size_t>(segments), 0);
  for (const Fragment& fragment : layout.shard(rank).fragments)
    lengths[fragment.segment] += fragment.length;
  return lengths;
}

TEST(DualChunkSwap, RealTokensAreAPrefixOfEverySegmentOfARank) {
  for (int cp = 1; cp <= 6; ++cp)
    for (int64_t chunk = 1; chunk <= 4; ++chunk)
      for (int64_t real = 0, slots = 2 * cp * chunk; real <= slots; ++real) {
        // An equal segment in front, so that the local base is not 0.
        const Layout layout = dual_chunk_swap(bounds_of({real, real}, {slots, slots}).view(), cp);
        bool naive = true;
        for (int r = 0; r < cp; ++r) {
          const int64_t expected = std::clamp<int64_t>(real - r * chunk, 0, chunk) +
                                   std::clamp<int64_t>(real - (2 * cp - 1 - r) * chunk, 0, chunk);
          EXPECT_EQ(local_real_lengths(layout, r, 2), (Lengths{expected, expected}));
          naive = naive && expected == real / cp;
          std::set<int64_t> held;
          for (const Fragment& f : layout.shard(r).fragments)
            for (int64_t k = 0; k < f.length; ++k)
              held.insert(f.segment * 1000 + f.local_begin.value() + k);
          std::set<int64_t> prefix;
          for (int64_t k = 0; k < expected; ++k) {
            prefix.insert(k);
            prefix.insert(1000 + 2 * chunk + k);
          }
          EXPECT_EQ(held, prefix) << "cp " << cp << " chunk " << chunk << " real " << real;
        }
        // Length over cp is right on all ranks for no, half and full segments only.
        if (cp > 1) {
          EXPECT_EQ(naive, real == 0 || 2 * real == slots || real == slots)
              << "cp " << cp << " chunk " << chunk << " real " << real;
        }
      }
}

TEST(DualChunkSwap, TrailingPaddingIsBetterASegmentOfItsOwn) {
  EXPECT_EQ(real_tokens({16, 16, 5}, {16, 16, 96}, 4), (Lengths{13, 8, 8, 8}));
  EXPECT_EQ(real_tokens({16, 16, 5, 0}, {16, 16, 8, 88}, 4), (Lengths{9, 9, 9, 10}));
}

// Others, of which some would be permutations, are in known_problems.cpp (BrokenContracts).
TEST(DualChunkSwap, MisalignedBoundariesAreRejected) {
  const auto message = [](const Ints& bounds, int cp) {
    return usage_message([&] { dual_chunk_swap({bounds, bounds}, cp); });
  };
  // A multiple of cp, in a total that is a multiple of 2·cp.
  EXPECT_EQ(message({0, 8, 18, 20}, 2),
            "segment 1: slot length 10 is not a multiple of 2·cp = 4; the next valid one is 12");
  EXPECT_EQ(message({0, 3}, 1),
            "segment 0: slot length 3 is not a multiple of 2·cp = 2; the next valid one is 4");
}

TEST(DualChunkSwap, ShortDocumentsNeedManySlots) {
  const auto needed = [](int32_t length) {
    const Ints bounds = {0, length};
    const std::string text = usage_message([&] { dual_chunk_swap({bounds, bounds}, 16); });
    return text.substr(text.rfind(' ') + 1);
  };
  EXPECT_EQ(needed(5), "32");
  EXPECT_EQ(needed(20), "32");
  EXPECT_EQ(needed(100), "128");
}

TEST(Bounds, BrokenOnesAreRejectedByName) {
  struct Case {
    Ints real, padded;
    std::string message;
  };
  const std::string must = "; 0 <= real <= slots must hold";
  const Ints falling = {0, 8, 4}, wrapped = {0, 2147483640, -2147483640};
  for (const Case& c : std::vector<Case>{
           {{4, 8}, {4, 8}, "segment boundaries must start at 0, not at 4 (real) and 4 (padded)"},
           {{0, 9}, {0, 8}, "segment 0: real length 9 and slot length 8" + must},
           {{0, 9},
            {0, 8, 12},
            "segment boundaries: 2 real and 3 padded entries; both need segments + 1"},
           {{}, {}, "segment boundaries: 0 real and 0 padded entries; both need segments + 1"},
           {falling, falling, "segment 1: real length -4 and slot length -4" + must},
           {{0, 0, 0}, falling, "segment 1: real length 0 and slot length -4" + must},
           {wrapped, wrapped,
            "segment 1: real length -4294967280 and slot length -4294967280" + must},
           {{0, 8}, {0, 8}, "no error"}})
    EXPECT_EQ(usage_message([&] { check_bounds({c.real, c.padded}); }), c.message);
}

TEST(Layouts, EveryKindChecksBoundariesAndRanks) {
  const Ints real = {0, 9}, padded = {0, 8};
  for (const LayoutKind& kind : layout_kinds()) {
    SCOPED_TRACE(kind.name);
    const auto message = [&](const SegmentBounds& bounds, int cp) {
      return usage_message([&] { kind.make(bounds, options_of(cp)); });
    };
    EXPECT_EQ(message({real, padded}, 2),
              "segment 0: real length 9 and slot length 8; 0 <= real <= slots must hold");
    EXPECT_EQ(message({padded, padded}, 0), "cp must be at least 1, not 0");
    EXPECT_EQ(message({padded, padded}, max_ranks + 1), "cp must be at most 65536, not 65537");
  }
}

TEST(Layouts, EveryKindIsFoundByItsNameAndMakesIt) {
  const Ints bounds = {0, 4, 16};
  for (const LayoutKind& kind : layout_kinds()) {
    EXPECT_EQ(&find_layout(kind.name), &kind);
    EXPECT_EQ(kind.make({bounds, bounds}, options_of(2)).name, kind.name);
  }
  EXPECT_EQ(usage_message([] { find_layout("zebra"); }),
            "there is no layout 'zebra'; there are contiguous, contiguous-documents, zigzag, "
            "dual-chunk-swap, striped, balanced, balanced-joint, hybrid");
}

TEST(Contiguous, PadsOnTheRight) {
  const Ints bounds = {0, 10};
  const Layout layout = contiguous({bounds, bounds}, options_of(4));
  EXPECT_EQ(indices(layout), (std::vector<Ints>{{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}}));
  EXPECT_EQ(layout.stream_slots, 10);
  EXPECT_EQ(layout.padded_slots, 12);
  EXPECT_EQ(real_tokens(layout), (Lengths{3, 3, 3, 1}));
}

TEST(Contiguous, FewerTokensThanRanks) {
  const Ints bounds = {0, 2};
  const Layout layout = contiguous({bounds, bounds}, options_of(4));
  EXPECT_EQ(indices(layout), (std::vector<Ints>{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(real_tokens(layout), (Lengths{1, 1, 0, 0}));
  EXPECT_TRUE(layout.shard(2).fragments.empty());
}

// As contiguous cuts the row: of documents of 4 and 12 slots it would give rank 0 the first 8.
TEST(ContiguousDocuments, CutsEveryDocument) {
  const Bounds bounds = bounds_of({4, 0, 9}, {4, 0, 12});
  const LayoutKind& kind = find_layout("contiguous-documents");
  const Layout layout = kind.make(bounds.view(), options_of(2));
  EXPECT_EQ(indices(layout),
            (std::vector<Ints>{{0, 1, 4, 5, 6, 7, 8, 9}, {2, 3, 10, 11, 12, 13, 14, 15}}));
  EXPECT_EQ(real_tokens(layout), (Lengths{8, 5}));
  EXPECT_EQ(layout.shard(1).fragments,
            (std::vector<Fragment>{{0, DocPosition(2), 1, 2, LocalToken(0)},
                                   {2, DocPosition(6), 1, 3, LocalToken(2)}}));
  EXPECT_EQ(usage_message([&] { kind.make(bounds.view(), options_of(3)); }),
            "segment 0: slot length 4 is not a multiple of cp = 3; the next valid one is 6");
}

TEST(Zigzag, CutsTheRowAndNotItsDocuments) {
  const Ints bounds = {0, 4, 16};
  const Layout layout = zigzag({bounds, bounds}, options_of(2));
  EXPECT_EQ(indices(layout),
            (std::vector<Ints>{{0, 1, 2, 3, 12, 13, 14, 15}, {4, 5, 6, 7, 8, 9, 10, 11}}));
  EXPECT_EQ(layout.shard(0).fragments,
            (std::vector<Fragment>{{0, DocPosition(0), 1, 4, LocalToken(0)},
                                   {1, DocPosition(8), 1, 4, LocalToken(4)}}));
}

TEST(Zigzag, PadsToTwiceCp) {
  const Ints bounds = {0, 5, 9};
  const Layout layout = zigzag({bounds, bounds}, options_of(2));
  EXPECT_EQ(indices(layout), (std::vector<Ints>{{0, 1, 2, 9, 10, 11}, {3, 4, 5, 6, 7, 8}}));
  EXPECT_EQ(real_tokens(layout), (Lengths{3, 6}));
}

TEST(Striped, SlotsRoundRobin) {
  const Ints bounds = {0, 5, 8};
  const Layout layout = striped({bounds, bounds}, options_of(3));
  EXPECT_EQ(indices(layout), (std::vector<Ints>{{0, 3, 6}, {1, 4, 7}, {2, 5, 8}}));
  EXPECT_EQ(layout.shard(0).fragments,
            (std::vector<Fragment>{{0, DocPosition(0), 3, 2, LocalToken(0)},
                                   {1, DocPosition(1), 3, 1, LocalToken(2)}}));
  EXPECT_EQ(layout.shard(2).fragments,
            (std::vector<Fragment>{{0, DocPosition(2), 3, 1, LocalToken(0)},
                                   {1, DocPosition(0), 3, 1, LocalToken(1)}}));
}

TEST(Striped, RunsOfSlots) {
  const Ints bounds = {0, 9};
  LayoutOptions options = options_of(2);
  options.stripe = 2;
  const Layout layout = striped({bounds, bounds}, options);
  EXPECT_EQ(indices(layout), (std::vector<Ints>{{0, 1, 4, 5, 8, 9}, {2, 3, 6, 7, 10, 11}}));
  EXPECT_EQ(real_tokens(layout), (Lengths{5, 4}));
}

TEST(Striped, RejectsImpossibleStripes) {
  const Ints bounds = {0, 9};
  const auto message = [&](int64_t stripe) {
    LayoutOptions options = options_of(2);
    options.stripe = stripe;
    return usage_message([&] { striped({bounds, bounds}, options); });
  };
  EXPECT_EQ(message(0), "the stripe must be 1 to 2147483647 slots, not 0");
  EXPECT_EQ(message(int64_t{1} << 31), "the stripe must be 1 to 2147483647 slots, not 2147483648");
  EXPECT_EQ(message(int64_t{1} << 30),
            "layout striped: 2147483648 slots exceed the int32 range of index lists");
}

TEST(MakeLayout, RanksHoldEquallyManySlots) {
  const Ints bounds = {0, 3};
  try {
    make_layout("lopsided", {bounds, bounds},
                {{{GlobalToken(0), 1, 2, {}}}, {{GlobalToken(2), 1, 1, {}}}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::runtime);
    EXPECT_NE(
        std::string(error.what()).find("layout lopsided: a rank has 2 slots of 3 over 2 ranks"),
        std::string::npos)
        << error.what();
  }
}

TEST(MakeLayout, PiecesLieInTheOrderGivenAndEmptyOnesAreLeftOut) {
  const Ints bounds = {0, 4};
  const Layout layout = make_layout(
      "one", {bounds, bounds},
      {{{GlobalToken(2), 1, 2, {}}, {GlobalToken(1), 1, 0, {}}, {GlobalToken(0), 1, 2, {}}}});
  EXPECT_EQ(shard_index(layout, 0), (Ints{2, 3, 0, 1}));
  EXPECT_EQ(layout.shard(0).runs, (std::vector<SlotRun>{{GlobalToken(2), 1, 2, LocalToken(0)},
                                                        {GlobalToken(0), 1, 2, LocalToken(2)}}));
}

TEST(EveryLayout, IndexListsAreABijectionAndOwnersTheirInverse) {
  EXPECT_TRUE(rc::check("every slot is in one index list, where its owner says", [] {
    const test::LayoutCase c = test::arbitrary_layout();
    RC_TAG(c.kind);
    const Layout& layout = c.layout;
    RC_ASSERT(layout.cp() == c.options.cp);
    RC_ASSERT(layout.stream_slots == c.bounds.view().slots());
    RC_ASSERT(layout.padded_slots >= layout.stream_slots);
    const std::vector<Owner> owners = slot_owners(layout);
    RC_ASSERT(std::ssize(owners) == layout.padded_slots);
    std::set<int32_t> seen;
    for (int r = 0; r < layout.cp(); ++r) {
      const Ints index = shard_index(layout, r);
      RC_ASSERT(std::ssize(index) == layout.shard(r).slots);
      RC_ASSERT(layout.shard(r).slots * layout.cp() == layout.padded_slots);
      RC_ASSERT(std::is_sorted(index.begin(), index.end()));
      for (size_t t = 0; t < index.size(); ++t) {
        RC_ASSERT(index[t] >= 0 && index[t] < layout.padded_slots);
        RC_ASSERT(seen.insert(index[t]).second);
        RC_ASSERT((owners[index[t]] == Owner{r, static_cast<int32_t>(t)}));
      }
    }
    RC_ASSERT(std::ssize(seen) == layout.padded_slots);
  }));
}

/// Rank and local slot -> segment and position, as fragments say it; nothing twice.
std::map<std::pair<int, int64_t>, std::pair<int64_t, int64_t>> tokens_of_fragments(
    const Layout& layout) {
  std::map<std::pair<int, int64_t>, std::pair<int64_t, int64_t>> tokens;
  for (int r = 0; r < layout.cp(); ++r)
    for (const Fragment& f : layout.shard(r).fragments) {
      RC_ASSERT(f.length > 0);
      for (int64_t k = 0; k < f.length; ++k)
        RC_ASSERT(tokens
                      .insert({{r, f.local_begin.value() + k},
                               {f.segment, f.start.value() + k * f.stride}})
                      .second);
    }
  return tokens;
}

TEST(EveryLayout, FragmentsNameExactlyTheRealTokens) {
  EXPECT_TRUE(rc::check("fragments and index lists agree; padding is in no fragment", [] {
    const test::LayoutCase c = test::arbitrary_layout();
    RC_TAG(c.kind);
    const SegmentBounds bounds = c.bounds.view();
    const auto tokens = tokens_of_fragments(c.layout);
    const std::vector<Owner> owners = slot_owners(c.layout);
    size_t expected = 0;
    for (int64_t i = 0; i < bounds.segments(); ++i)
      for (int64_t p = 0; p < bounds.real_length(i); ++p, ++expected) {
        const Owner owner = owners[bounds.begin(i) + p];
        const auto found = tokens.find({owner.rank, owner.local});
        RC_ASSERT(found != tokens.end());
        RC_ASSERT(found->second == std::pair(i, p));
      }
    RC_ASSERT(tokens.size() == expected);
    for (const Shard& shard : c.layout.shards)
      RC_ASSERT(std::is_sorted(
          shard.fragments.begin(), shard.fragments.end(),
          [](const Fragment& a, const Fragment& b) { return a.local_begin < b.local_begin; }));
  }));
}

TEST(QueryLayouts, PutNewKeysBesideTheirQueries) {
  const Lengths offsets{0, 6}, query_offsets{0, 2};
  const QueryLayouts placed(offsets, query_offsets, find_layout("contiguous"), options_of(2));
  // Rank 0 has a b e and rank 1 c d f of the document abcdef, of which e and f have queries.
  const auto keys = tokens_of_fragments(placed.layout);
  const std::map<std::pair<int, int64_t>, std::pair<int64_t, int64_t>> expected{
      {{0, 0}, {0, 0}}, {{0, 1}, {0, 1}}, {{0, 2}, {0, 4}},
      {{1, 0}, {0, 2}}, {{1, 1}, {0, 3}}, {{1, 2}, {0, 5}}};
  EXPECT_EQ(keys, expected);
  EXPECT_EQ(placed.layout.slots_of_rank(), 3);
  EXPECT_EQ(placed.queries()->slots_of_rank(), 1);
}

TEST(QueryLayouts, HaveEveryTokenOnceAndEveryQueryWhereItsKeyIs) {
  EXPECT_TRUE(rc::check("any layout", [] {
    const test::LayoutCase c = test::arbitrary_layout();
    Lengths offsets{0}, query_offsets{0};
    for (int64_t d = 0; d < c.bounds.view().segments(); ++d) {
      const int64_t length = c.bounds.view().real_length(d);
      offsets.push_back(offsets.back() + length);
      query_offsets.push_back(query_offsets.back() + *rc::gen::inRange<int64_t>(0, length + 1));
    }
    const QueryLayouts placed(offsets, query_offsets, find_layout(c.kind), c.options);
    std::map<std::pair<int64_t, int64_t>, int> ranks;  // of tokens
    for (const auto& [place, token] : tokens_of_fragments(placed.layout))
      RC_ASSERT(ranks.emplace(token, place.first).second);
    RC_ASSERT(std::ssize(ranks) == offsets.back());
    const auto queries = tokens_of_fragments(*placed.queries());
    RC_ASSERT(std::ssize(queries) == query_offsets.back());
    for (const auto& [place, query] : queries) {
      const auto [d, position] = query;
      const int64_t last = offsets[d + 1] - offsets[d] - 1;
      RC_ASSERT(position > last - (query_offsets[d + 1] - query_offsets[d]));
      RC_ASSERT(ranks.at(query) == place.first);
    }
  }));
}

TEST(SegmentIds, EmptySegmentsAreSkipped) {
  EXPECT_EQ(segment_ids(Ints{0, 4, 8}), (Ints{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(segment_ids(Ints{0, 4, 4, 8}), (Ints{0, 0, 0, 0, 2, 2, 2, 2}));
  EXPECT_EQ(segment_ids(Ints{0}), Ints{});
}

TEST(SegmentIds, EqualAnUpperBoundSearchAndDifferFromALowerBoundSearch) {
  EXPECT_TRUE(rc::check("a lower bound is wrong at the first slots of segments, only there", [] {
    const Ints bounds = test::arbitrary_bounds(1).padded;
    const Ints ids = segment_ids(bounds);
    RC_ASSERT(std::ssize(ids) == bounds.back());
    for (int32_t slot = 0; slot < bounds.back(); ++slot) {
      int32_t brute = -1;
      for (size_t i = 0; i + 1 < bounds.size(); ++i)
        if (bounds[i] <= slot && slot < bounds[i + 1]) brute = static_cast<int32_t>(i);
      RC_ASSERT(ids[slot] == brute);
      const auto below = std::lower_bound(bounds.begin() + 1, bounds.end(), slot);
      const bool same = below - (bounds.begin() + 1) == brute;
      const bool first = std::find(bounds.begin() + 1, bounds.end(), slot) != bounds.end();
      RC_ASSERT(same == !first);
    }
  }));
}

TEST(MakeLayout, DebugBuildsNoticeASlotThatIsOwnedTwice) {
#ifdef NDEBUG
  GTEST_SKIP() << "only builds without NDEBUG check it (preset asan)";
#else
  const Ints bounds = {0, 4};
  try {
    make_layout("overlap", {bounds, bounds},
                {{{GlobalToken(0), 1, 2, {}}}, {{GlobalToken(1), 1, 2, {}}}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("slot 1 is owned twice"), std::string::npos)
        << error.what();
  }
#endif
}

}  // namespace GYRE_FILE
}  // namespace gyre
