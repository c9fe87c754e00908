// DualChunkSwap: index maps, inverses, fragments, rejection of broken boundaries.

#include "sharding/layout.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <functional>
#include <numeric>
#include <set>

#include "core/error.hpp"
#include "sharding/local_batch.hpp"

namespace gyre {
namespace {

using Ints = std::vector<int32_t>;

Ints index_of(const Ints& bounds, int cp, int rank) {
  return dual_chunk_swap_index({bounds, bounds}, cp, rank);
}

/// Real tokens of `rank` per segment.
std::vector<int64_t> real_lengths(int64_t real, int64_t slots, int cp) {
  const Ints cu = {0, static_cast<int32_t>(real)}, padded = {0, static_cast<int32_t>(slots)};
  std::vector<int64_t> lengths;
  for (const Shard& shard : dual_chunk_swap({cu, padded}, cp).shards) {
    int64_t sum = 0;
    for (const Fragment& fragment : shard.fragments) sum += fragment.length;
    lengths.push_back(sum);
  }
  return lengths;
}

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
  return "no error";
}

TEST(DualChunkSwap, OneSegment) {
  EXPECT_EQ(index_of({0, 12}, 2, 0), (Ints{0, 1, 2, 9, 10, 11}));
  EXPECT_EQ(index_of({0, 12}, 2, 1), (Ints{3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(index_of({0, 16}, 4, 0), (Ints{0, 1, 14, 15}));
  EXPECT_EQ(index_of({0, 16}, 4, 1), (Ints{2, 3, 12, 13}));
  EXPECT_EQ(index_of({0, 16}, 4, 2), (Ints{4, 5, 10, 11}));
  EXPECT_EQ(index_of({0, 16}, 4, 3), (Ints{6, 7, 8, 9}));
}

TEST(DualChunkSwap, TwoSegments) {
  EXPECT_EQ(index_of({0, 8, 12}, 2, 0), (Ints{0, 1, 6, 7, 8, 11}));
  EXPECT_EQ(index_of({0, 8, 12}, 2, 1), (Ints{2, 3, 4, 5, 9, 10}));
  EXPECT_EQ(index_of({0, 8, 16}, 2, 0), (Ints{0, 1, 6, 7, 8, 9, 14, 15}));
  EXPECT_EQ(index_of({0, 8, 16}, 2, 1), (Ints{2, 3, 4, 5, 10, 11, 12, 13}));
}

TEST(DualChunkSwap, FourSegmentsFourRanks) {
  const Ints bounds = {0, 8, 16, 24, 40};
  EXPECT_EQ(index_of(bounds, 4, 0), (Ints{0, 7, 8, 15, 16, 23, 24, 25, 38, 39}));
  EXPECT_EQ(index_of(bounds, 4, 1), (Ints{1, 6, 9, 14, 17, 22, 26, 27, 36, 37}));
  EXPECT_EQ(index_of(bounds, 4, 2), (Ints{2, 5, 10, 13, 18, 21, 28, 29, 34, 35}));
  EXPECT_EQ(index_of(bounds, 4, 3), (Ints{3, 4, 11, 12, 19, 20, 30, 31, 32, 33}));
}

TEST(DualChunkSwap, EmptySegments) {
  EXPECT_EQ(index_of({0, 4, 12, 12, 20}, 2, 0), (Ints{0, 3, 4, 5, 10, 11, 12, 13, 18, 19}));
  EXPECT_EQ(index_of({0, 4, 12, 12, 20}, 2, 1), (Ints{1, 2, 6, 7, 8, 9, 14, 15, 16, 17}));
  EXPECT_EQ(index_of({0, 0, 8}, 2, 0), (Ints{0, 1, 6, 7}));
  EXPECT_EQ(index_of({0, 0, 8}, 2, 1), (Ints{2, 3, 4, 5}));
  EXPECT_EQ(index_of({0, 0}, 3, 1), Ints{});
}

TEST(DualChunkSwap, RealLengthsAreNotTheLengthOverCp) {
  EXPECT_EQ(real_lengths(7, 8, 2), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(real_lengths(9, 12, 2), (std::vector<int64_t>{3, 6}));
  EXPECT_EQ(real_lengths(8, 12, 2), (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(real_lengths(5, 8, 2), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(real_lengths(1, 8, 2), (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(real_lengths(3, 8, 4), (std::vector<int64_t>{1, 1, 1, 0}));
  EXPECT_EQ(real_lengths(698, 704, 4), (std::vector<int64_t>{170, 176, 176, 176}));
}

TEST(DualChunkSwap, MisalignedBoundariesAreRejectedEvenWhereTheyWouldPermute) {
  EXPECT_EQ(message_of([] {
              index_of({0, 6, 12}, 2, 0);
            }),
            "segment 0: slot length 6 is not a multiple of 2·cp = 4; the next valid one is 8");
  EXPECT_EQ(message_of([] {
              index_of({0, 5, 12}, 2, 0);
            }),
            "segment 0: slot length 5 is not a multiple of 2·cp = 4; the next valid one is 8");
  EXPECT_EQ(message_of([] {
              index_of({0, 8, 18}, 2, 1);
            }),
            "segment 1: slot length 10 is not a multiple of 2·cp = 4; the next valid one is 12");
}

TEST(DualChunkSwap, BrokenBoundariesAreRejectedByName) {
  EXPECT_EQ(message_of([] {
              index_of({4, 8}, 2, 0);
            }),
            "segment boundaries must start at 0, not at 4 (real) and 4 (padded)");
  const Ints real = {0, 9}, padded = {0, 8};
  EXPECT_EQ(message_of([&] {
              dual_chunk_swap({real, padded}, 2);
            }),
            "segment 0: real length 9 and slot length 8; 0 <= real <= slots must hold");
  const Ints longer = {0, 8, 12};
  EXPECT_EQ(message_of([&] {
              dual_chunk_swap({real, longer}, 2);
            }),
            "segment boundaries: 2 real and 3 padded entries; both need segments + 1");
  EXPECT_EQ(message_of([&] {
              dual_chunk_swap({padded, padded}, 0);
            }),
            "cp must be at least 1, not 0");
}

/// Random real and slot boundaries for cp ranks, tiny and empty segments included.
struct Bounds {
  Ints real = {0}, padded = {0};
};
Bounds arbitrary_bounds(int cp) {
  Bounds bounds;
  for (int64_t n : *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 50))) {
    bounds.real.push_back(bounds.real.back() + static_cast<int32_t>(n));
    bounds.padded.push_back(bounds.padded.back() + static_cast<int32_t>(round_up(n, 2 * cp)));
  }
  return bounds;
}

TEST(DualChunkSwap, IndexAndOwnerAreInverse) {
  EXPECT_TRUE(rc::check("index maps are a bijection and owner is their inverse", [] {
    const int cp = *rc::gen::inRange(1, 17);
    const Bounds b = arbitrary_bounds(cp);
    const SegmentBounds bounds{b.real, b.padded};
    const std::vector<Owner> owner = dual_chunk_swap_owner(bounds, cp);
    std::set<int32_t> seen;
    for (int r = 0; r < cp; ++r) {
      const Ints index = dual_chunk_swap_index(bounds, cp, r);
      RC_ASSERT(std::ssize(index) == bounds.padded.back() / cp);
      for (size_t t = 0; t < index.size(); ++t) {
        RC_ASSERT(seen.insert(index[t]).second);
        RC_ASSERT((owner[static_cast<size_t>(index[t])] == Owner{r, static_cast<int32_t>(t)}));
      }
    }
    RC_ASSERT(std::ssize(seen) == bounds.padded.back());
  }));
}

TEST(DualChunkSwap, FragmentsNameExactlyTheRealTokens) {
  EXPECT_TRUE(rc::check("fragments and index map agree; pads are in no fragment", [] {
    const int cp = *rc::gen::inRange(1, 9);
    const Bounds b = arbitrary_bounds(cp);
    const SegmentBounds bounds{b.real, b.padded};
    const Layout layout = dual_chunk_swap(bounds, cp);
    int64_t real = 0;
    for (int r = 0; r < cp; ++r) {
      const Ints index = dual_chunk_swap_index(bounds, cp, r);
      const Shard& shard = layout.shards[static_cast<size_t>(r)];
      RC_ASSERT(shard.slots == std::ssize(index));
      for (const Fragment& f : shard.fragments) {
        RC_ASSERT(f.length > 0);
        for (int64_t i = 0; i < f.length; ++i, ++real) {
          const auto segment = static_cast<size_t>(f.segment.value());
          const int64_t position = f.start.value() + i * f.stride;
          RC_ASSERT(position < bounds.real_length(f.segment.value()));
          RC_ASSERT(index[static_cast<size_t>(f.local_begin.value() + i)] ==
                    b.padded[segment] + position);
        }
      }
    }
    RC_ASSERT(real == b.real.back());
  }));
}

TEST(LocalBatch, ShiftsTargetsBeforeSharding) {
  const Ints bounds = {0, 8};
  const Ints text = {10, 11, 12, 13, 14, 15, 16, 17};
  const std::vector<std::span<const int32_t>> documents = {text};
  EXPECT_EQ(make_local_batch({bounds, bounds}, documents, 2, 0).targets, (Ints{11, 12, 17, -1}));
  EXPECT_EQ(make_local_batch({bounds, bounds}, documents, 2, 1).targets, (Ints{13, 14, 15, 16}));
}

TEST(LocalBatch, TwoDocumentsWithPadding) {
  // Real lengths 7 and 3 in 8 and 4 slots, cp = 2.
  const Ints real = {0, 7, 10}, padded = {0, 8, 12};
  const Ints first = {1, 2, 3, 4, 5, 6, 7}, second = {11, 12, 13};
  const std::vector<std::span<const int32_t>> documents = {first, second};
  const LocalBatch r0 = make_local_batch({real, padded}, documents, 2, 0);
  EXPECT_EQ(r0.tokens, (Ints{1, 2, 7, 0, 11, 0}));
  EXPECT_EQ(r0.positions, (Ints{0, 1, 6, 7, 0, 3}));
  EXPECT_EQ(r0.targets, (Ints{2, 3, -1, -1, 12, -1}));
  const LocalBatch r1 = make_local_batch({real, padded}, documents, 2, 1);
  EXPECT_EQ(r1.tokens, (Ints{3, 4, 5, 6, 12, 13}));
  EXPECT_EQ(r1.positions, (Ints{2, 3, 4, 5, 1, 2}));
  EXPECT_EQ(r1.targets, (Ints{4, 5, 6, 7, 13, -1}));
}

}  // namespace
}  // namespace gyre
