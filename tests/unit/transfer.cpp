// Streams into shards and back: against index lists, bit for bit, and arrays of wrong lengths.

#include "sharding/transfer.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstring>

#include "layout_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::full_bounds;
using test::usage_message;
using Ints = std::vector<int32_t>;

Layout swap_of_8() {
  return dual_chunk_swap(full_bounds({8}).view(), 2);
}
Layout contiguous_10_over_4() {
  LayoutOptions options;
  options.cp = 4;
  return contiguous(full_bounds({10}).view(), options);
}

TEST(ShardRows, WrongLengthsAreRejectedWithTheValidOnes) {
  const auto message = [](const Layout& layout, size_t stream, size_t local, int64_t row) {
    Ints from(stream), to(local);
    std::string there = usage_message([&] { shard_rows<int32_t>(layout, 0, from, to, row); });
    const std::string back =
        usage_message([&] { unshard_rows<int32_t>(layout, 0, to, from, row); });
    EXPECT_EQ(there, back);
    return there;
  };
  // Boundaries that leave the tail of the stream uncovered.
  EXPECT_EQ(message(swap_of_8(), 16, 4, 1),
            "layout dual-chunk-swap: the stream has 16 rows; it must have 8");
  EXPECT_EQ(message(contiguous_10_over_4(), 11, 3, 1),
            "layout contiguous: the stream has 11 rows; it must have 10 or, padded, 12");
  EXPECT_EQ(message(contiguous_10_over_4(), 10, 4, 1),
            "layout contiguous: the shard has 4 rows; it must have 3");
  EXPECT_EQ(message(contiguous_10_over_4(), 21, 6, 2),
            "layout contiguous: 84 bytes of the stream are not whole rows of 8 bytes");
  EXPECT_EQ(message(contiguous_10_over_4(), 10, 3, 0),
            "layout contiguous: a row must have at least 1 element");
  EXPECT_EQ(message(contiguous_10_over_4(), 20, 6, 2), "no error");
}

TEST(ShardRows, RanksThatTheLayoutDoesNotHave) {
  Ints stream(8), local(4);
  for (const int rank : {-1, 2}) try {
      shard_rows<int32_t>(swap_of_8(), rank, stream, local);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::runtime);
    }
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return std::ranges::equal(std::as_bytes(a), std::as_bytes(b));
}
template <class T>
bool same_bits(const T& a, const T& b) {
  return same_bits(std::span<const T>(&a, 1), std::span<const T>(&b, 1));
}

/// Shards of all ranks, each between guard elements that must survive.
template <class T>
std::vector<std::vector<T>> shard_all(const Layout& layout, const std::vector<T>& stream,
                                      int64_t row, T fill, T guard) {
  std::vector<std::vector<T>> shards;
  for (int r = 0; r < layout.cp(); ++r) {
    const auto size = static_cast<size_t>(layout.shard(r).slots * row);
    std::vector<T> guarded(size + 2, guard);
    shard_rows<T>(layout, r, stream, std::span(guarded).subspan(1, size), row, fill);
    RC_ASSERT(same_bits(guarded.front(), guard));
    RC_ASSERT(same_bits(guarded.back(), guard));
    shards.emplace_back(guarded.begin() + 1, guarded.end() - 1);
  }
  return shards;
}

/// Any bit pattern is a T, NaN and subnormal numbers too.
template <class T>
std::vector<T> random_bits(int64_t count, unsigned seed) {
  std::vector<T> values(count);
  std::vector<unsigned char> bytes(values.size() * sizeof(T));
  for (unsigned char& byte : bytes) {
    seed = seed * 1664525U + 1013904223U;
    byte = static_cast<unsigned char>(seed >> 24);
  }
  if (count > 0) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Both ways, from streams with and without the layout's padding.
template <class T>
void check_round_trip() {
  const test::LayoutCase c = test::arbitrary_layout();
  RC_TAG(c.kind);
  const Layout& layout = c.layout;
  const int64_t row = *rc::gen::weightedOneOf<int64_t>(
      {{1, rc::gen::just<int64_t>(1)}, {1, rc::gen::inRange<int64_t>(2, 70)}});
  const auto seed = *rc::gen::arbitrary<unsigned>();
  const T fill = random_bits<T>(1, seed ^ 1)[0], guard = random_bits<T>(1, seed ^ 2)[0];
  for (const int64_t slots : {layout.stream_slots, layout.padded_slots}) {
    const std::vector<T> stream = random_bits<T>(slots * row, seed);
    const auto shards = shard_all(layout, stream, row, fill, guard);
    std::vector<T> back(stream.size(), guard);
    for (int r = 0; r < layout.cp(); ++r) {
      const std::vector<T>& mine = shards[r];
      const Ints index = shard_index(layout, r);
      for (size_t e = 0; e < mine.size(); ++e) {
        const int64_t slot = index[e / static_cast<size_t>(row)];
        const auto from = static_cast<size_t>(slot * row) + e % static_cast<size_t>(row);
        const T& expected = slot < slots ? stream[from] : fill;
        RC_ASSERT(same_bits(mine[e], expected));
      }
      unshard_rows<T>(layout, r, mine, back, row);
    }
    RC_ASSERT(same_bits(std::span<const T>(back), std::span<const T>(stream)));
  }
}

struct ThreeBytes {
  unsigned char bytes[3];
};

TEST(EveryLayout, ShardsAndBackAreExactForElementsOfAnySize) {
  EXPECT_TRUE(rc::check("1 byte", check_round_trip<uint8_t>));
  EXPECT_TRUE(rc::check("2 bytes", check_round_trip<uint16_t>));
  EXPECT_TRUE(rc::check("3 bytes", check_round_trip<ThreeBytes>));
  EXPECT_TRUE(rc::check("4 bytes, NaN among them", check_round_trip<float>));
  EXPECT_TRUE(rc::check("8 bytes", check_round_trip<int64_t>));
}

TEST(EveryLayout, RunsOfAnyLengthAreCopiedWhole) {
  // Runs of 1 to 300 bytes, so that short and long copies meet.
  for (int64_t run = 1; run <= 300; ++run) {
    const Layout layout = dual_chunk_swap(full_bounds({4 * run, 4 * run}).view(), 2);
    const std::vector<uint8_t> stream = random_bits<uint8_t>(8 * run, static_cast<unsigned>(run));
    std::vector<uint8_t> back(stream.size(), 0);
    for (int r = 0; r < 2; ++r) {
      std::vector<uint8_t> local(4 * run, 0), expected;
      shard_rows<uint8_t>(layout, r, stream, local);
      for (const int32_t slot : shard_index(layout, r)) expected.push_back(stream[slot]);
      EXPECT_EQ(local, expected) << run;
      unshard_rows<uint8_t>(layout, r, local, back);
    }
    EXPECT_EQ(back, stream) << run;
  }
}

TEST(EveryLayout, FastAndReferenceAgree) {
  EXPECT_TRUE(rc::check("rows of doubles, both ways", [] {
    const test::LayoutCase c = test::arbitrary_layout();
    RC_TAG(c.kind);
    const int64_t row = *rc::gen::inRange<int64_t>(1, 5);
    const bool padded = *rc::gen::arbitrary<bool>();
    const int64_t slots = padded ? c.layout.padded_slots : c.layout.stream_slots;
    std::vector<double> stream(slots * row);
    for (size_t i = 0; i < stream.size(); ++i) stream[i] = static_cast<double>(i);
    std::vector<double> back(stream.size(), -2), back_reference = back;
    for (int r = 0; r < c.layout.cp(); ++r) {
      std::vector<double> local(c.layout.shard(r).slots * row, -3);
      std::vector<double> reference = local;
      shard_rows<double>(c.layout, r, stream, local, row, -1);
      shard_rows_reference(c.layout, r, stream, reference, row, -1);
      RC_ASSERT(local == reference);
      unshard_rows<double>(c.layout, r, local, back, row);
      unshard_rows_reference(c.layout, r, local, back_reference, row);
      RC_ASSERT(back == back_reference);
    }
  }));
}

Layout by_hand(const std::vector<std::vector<SlotRun>>& pieces) {
  return make_layout("by-hand", full_bounds({16}).view(), pieces);
}
SlotRun piece(int64_t start, int64_t stride, int64_t length) {
  return {GlobalToken(start), stride, length, {}};
}
/// Runs in any local order.
Layout shuffled() {
  return by_hand({{piece(9, 1, 4), piece(0, 1, 3), piece(15, 1, 1)},
                  {piece(3, 1, 5), piece(13, 1, 2), piece(8, 1, 1)}});
}
/// Even and odd slots, in two pieces each.
Layout interleaved() {
  return by_hand({{piece(2, 4, 4), piece(0, 4, 4)}, {piece(1, 4, 4), piece(3, 4, 4)}});
}
/// Odd slots on rank 0, even ones on rank 1.
Layout odd_first() {
  return by_hand({{piece(1, 2, 8)}, {piece(0, 2, 8)}});
}

TEST(AllShards, SlotsPastTheStreamAreFilledAndDropped) {
  Ints stream(20), shards(24), back(20, -1), padded(24, -1);
  for (size_t i = 0; i < stream.size(); ++i) stream[i] = static_cast<int32_t>(i);
  shard_all_rows<int32_t>(contiguous_10_over_4(), stream, shards, 2, -100);
  EXPECT_EQ(Ints(shards.end() - 6, shards.end()), (Ints{18, 19, -100, -100, -100, -100}));
  unshard_all_rows<int32_t>(contiguous_10_over_4(), shards, back, 2);
  EXPECT_EQ(back, stream);
  unshard_all_rows<int32_t>(contiguous_10_over_4(), shards, padded, 2);
  EXPECT_EQ(padded, shards);
}

TEST(AllShards, PiecesInAnyLocalOrder) {
  Ints stream(16), back(16, -1);
  for (size_t i = 0; i < stream.size(); ++i) stream[i] = static_cast<int32_t>(i);
  Ints shards(16, -1);
  shard_all_rows<int32_t>(shuffled(), stream, shards);
  EXPECT_EQ(shards, (Ints{9, 10, 11, 12, 0, 1, 2, 15, 3, 4, 5, 6, 7, 13, 14, 8}));
  unshard_all_rows<int32_t>(shuffled(), shards, back);
  EXPECT_EQ(back, stream);
  shard_all_rows<int32_t>(interleaved(), stream, shards);
  EXPECT_EQ(shards, (Ints{2, 6, 10, 14, 0, 4, 8, 12, 1, 5, 9, 13, 3, 7, 11, 15}));
  back.assign(16, -1);
  unshard_all_rows<int32_t>(interleaved(), shards, back);
  EXPECT_EQ(back, stream);
}

TEST(AllShards, OfNoRanksAndOfAnEmptyStream) {
  Ints none;
  shard_all_rows<int32_t>(Layout(), none, none);
  unshard_all_rows<int32_t>(Layout(), none, none);
  const Layout empty = dual_chunk_swap(full_bounds({0}).view(), 2);
  shard_all_rows<int32_t>(empty, none, none);
  unshard_all_rows<int32_t>(empty, none, none);
}

TEST(AllShards, WrongLengthsAreRejectedWithTheValidOnes) {
  const auto message = [](const Layout& layout, size_t stream, size_t shards, int64_t row) {
    Ints from(stream), to(shards);
    std::string there = usage_message([&] { shard_all_rows<int32_t>(layout, from, to, row); });
    const std::string back =
        usage_message([&] { unshard_all_rows<int32_t>(layout, to, from, row); });
    EXPECT_EQ(there, back);
    return there;
  };
  EXPECT_EQ(message(swap_of_8(), 16, 8, 1),
            "layout dual-chunk-swap: the stream has 16 rows; it must have 8");
  EXPECT_EQ(message(contiguous_10_over_4(), 11, 12, 1),
            "layout contiguous: the stream has 11 rows; it must have 10 or, padded, 12");
  EXPECT_EQ(message(contiguous_10_over_4(), 10, 10, 1),
            "layout contiguous: the array of all shards has 10 rows; it must have 12");
  EXPECT_EQ(message(contiguous_10_over_4(), 20, 25, 2),
            "layout contiguous: 100 bytes of the array of all shards are not whole rows of 8 "
            "bytes");
  EXPECT_EQ(message(contiguous_10_over_4(), 10, 12, 0),
            "layout contiguous: a row must have at least 1 element");
  EXPECT_EQ(message(contiguous_10_over_4(), 20, 24, 2), "no error");
}

/// All shards at once against rank by rank, there and back, as small and as large streams.
/// Arrays begin after `offset` guard elements, so that lines are broken everywhere; on the way back
/// shards lie `gap` elements apart.
template <class T>
void check_all_ranks(const Layout& layout, int64_t row, int64_t offset, int64_t gap) {
  constexpr auto size = static_cast<int64_t>(sizeof(T));
  const T fill = random_bits<T>(1, 3)[0], guard = random_bits<T>(1, 4)[0];
  const auto at = static_cast<size_t>(offset);
  for (const int64_t slots : {layout.stream_slots, layout.padded_slots})
    for (const int64_t cached : {int64_t{0}, detail::cached_stream_bytes}) {
      const std::vector<T> stream = random_bits<T>(slots * row, 7);
      const auto each = static_cast<size_t>(layout.padded_slots / layout.cp() * row);
      const size_t step = each + static_cast<size_t>(gap), cp = static_cast<size_t>(layout.cp());
      std::vector<T> shards(at + each * cp + 1, guard), expected(each * cp, guard);
      std::vector<T> apart(at + step * cp, guard), back(at + stream.size() + 1, guard);
      for (size_t r = 0; r < cp; ++r) {
        const auto mine = std::span(expected).subspan(r * each, each);
        shard_rows<T>(layout, static_cast<int>(r), stream, mine, row, fill);
        std::ranges::copy(mine, apart.begin() + static_cast<int64_t>(at + r * step));
      }
      detail::shard_all_bytes(
          layout, std::as_bytes(std::span(stream)), std::as_bytes(std::span(&fill, 1)),
          std::as_writable_bytes(std::span(shards).subspan(at, each * cp)), row * size, cached);
      RC_ASSERT(same_bits(std::span<const T>(shards).subspan(at, each * cp),
                          std::span<const T>(expected)));
      RC_ASSERT(same_bits(shards.back(), guard));
      detail::unshard_all_bytes(
          layout, std::as_bytes(std::span(apart).subspan(at, step * (cp - 1) + each)),
          static_cast<int64_t>(step) * size,
          std::as_writable_bytes(std::span(back).subspan(at, stream.size())), row * size, cached);
      RC_ASSERT(same_bits(std::span<const T>(back).subspan(at, stream.size()),
                          std::span<const T>(stream)));
      RC_ASSERT(same_bits(back.back(), guard));
      for (size_t i = 0; i < at; ++i) {
        RC_ASSERT(same_bits(shards[i], guard));
        RC_ASSERT(same_bits(back[i], guard));
      }
    }
}

template <class T>
void check_all_ranks_of_any_layout() {
  const test::LayoutCase c = test::arbitrary_layout();
  RC_TAG(c.kind);
  const int64_t row = *rc::gen::weightedOneOf<int64_t>(
      {{1, rc::gen::just<int64_t>(1)}, {2, rc::gen::inRange<int64_t>(2, 300)}});
  check_all_ranks<T>(c.layout, row, *rc::gen::inRange<int64_t>(0, 64),
                     *rc::gen::inRange<int64_t>(0, 3));
}

TEST(AllShards, AreWhatRankByRankGives) {
  EXPECT_TRUE(rc::check("1 byte", check_all_ranks_of_any_layout<uint8_t>));
  EXPECT_TRUE(rc::check("2 bytes", check_all_ranks_of_any_layout<uint16_t>));
  EXPECT_TRUE(rc::check("3 bytes", check_all_ranks_of_any_layout<ThreeBytes>));
  EXPECT_TRUE(rc::check("4 bytes, NaN among them", check_all_ranks_of_any_layout<float>));
  EXPECT_TRUE(rc::check("8 bytes", check_all_ranks_of_any_layout<int64_t>));
}

TEST(AllShards, OfLargeStreamsWithPiecesInAnyLocalOrder) {
  EXPECT_TRUE(rc::check("layouts by hand", [] {
    check_all_ranks<int32_t>(*rc::gen::element(shuffled(), interleaved(), odd_first()),
                             *rc::gen::element<int64_t>(1, 8, 16, 300),
                             *rc::gen::inRange<int64_t>(0, 16), 1);
  }));
}

TEST(AllShards, OfLongStreams) {
  // Many blocks, long documents next to short ones, and rows of every size with a loop of its own.
  EXPECT_TRUE(rc::check("thousands of slots", [] {
    const int cp = *rc::gen::inRange(1, 9);
    test::Bounds bounds;
    while (bounds.view().slots() < 5000) {
      const int64_t slots = 2 * cp * *rc::gen::element<int64_t>(1, 2, 3, 5, 40, 300);
      bounds.add(slots, slots);
    }
    LayoutOptions options;
    options.cp = cp;
    const LayoutKind& kind = *rc::gen::elementOf(layout_kinds());
    RC_TAG(kind.name);
    const Layout layout = kind.make(bounds.view(), options);
    const int64_t offset = *rc::gen::inRange<int64_t>(0, 64);
    check_all_ranks<uint8_t>(layout, *rc::gen::element<int64_t>(1, 2, 3, 4, 8, 16, 24, 64, 100),
                             offset, 0);
    check_all_ranks<int32_t>(layout, 1, offset % 16, 0);
  }));
}

}  // namespace GYRE_FILE
}  // namespace gyre
