// Streams into shards and back: against index lists, bit for bit, and arrays of wrong lengths.

#include "sharding/transfer.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstring>

#include "layout_cases.hpp"

namespace gyre {
namespace {

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

TEST(ShardRows, IdsOfOneRank) {
  const Ints stream = {10, 11, 12, 13, 14, 15, 16, 17};
  Ints local(4);
  shard_rows<int32_t>(swap_of_8(), 0, stream, local);
  EXPECT_EQ(local, (Ints{10, 11, 16, 17}));
  shard_rows<int32_t>(swap_of_8(), 1, stream, local);
  EXPECT_EQ(local, (Ints{12, 13, 14, 15}));
}

TEST(ShardRows, SlotsPastTheStreamAreFilled) {
  Ints stream(20), local(6);
  for (size_t i = 0; i < stream.size(); ++i) stream[i] = static_cast<int32_t>(i);
  shard_rows<int32_t>(contiguous_10_over_4(), 3, stream, local, 2, -100);
  EXPECT_EQ(local, (Ints{18, 19, -100, -100, -100, -100}));
  std::vector<double> labels(10, 1), mine(3);
  shard_rows<double>(contiguous_10_over_4(), 3, labels, mine, 1, 0.5);
  EXPECT_EQ(mine, (std::vector<double>{1, 0.5, 0.5}));
}

TEST(ShardRows, APaddedStreamBringsItsOwnPadding) {
  Ints stream(12, 7), local(3);
  stream[10] = 8;
  stream[11] = 9;
  shard_rows<int32_t>(contiguous_10_over_4(), 3, stream, local, 1, -100);
  EXPECT_EQ(local, (Ints{7, 8, 9}));
  Ints back(12, 0);
  unshard_rows<int32_t>(contiguous_10_over_4(), 3, local, back);
  EXPECT_EQ(back, (Ints{0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 8, 9}));
}

TEST(UnshardRows, OtherRanksSlotsAreLeftAloneAndPaddingIsDropped) {
  const Ints local = {1, 2, 3};
  Ints stream(10, -1);
  unshard_rows<int32_t>(contiguous_10_over_4(), 3, local, stream);
  EXPECT_EQ(stream, (Ints{-1, -1, -1, -1, -1, -1, -1, -1, -1, 1}));
}

TEST(ShardRows, WrongLengthsAreRejectedWithTheValidOnes) {
  const auto message = [](const Layout& layout, size_t stream, size_t local, int64_t row) {
    Ints from(stream), to(local);
    const std::string there = usage_message([&] { shard_rows<int32_t>(layout, 0, from, to, row); });
    const std::string back =
        usage_message([&] { unshard_rows<int32_t>(layout, 0, to, from, row); });
    EXPECT_EQ(there, back);
    return there;
  };
  // Boundaries that leave the tail of the stream uncovered.
  EXPECT_STREQ(message(swap_of_8(), 16, 4, 1).c_str(),
               "layout dual-chunk-swap: the stream has 16 rows; it must have 8");
  EXPECT_STREQ(message(contiguous_10_over_4(), 11, 3, 1).c_str(),
               "layout contiguous: the stream has 11 rows; it must have 10 or, padded, 12");
  EXPECT_STREQ(message(contiguous_10_over_4(), 10, 4, 1).c_str(),
               "layout contiguous: the shard has 4 rows; it must have 3");
  EXPECT_STREQ(message(contiguous_10_over_4(), 21, 6, 2).c_str(),
               "layout contiguous: 84 bytes of the stream are not whole rows of 8 bytes");
  EXPECT_STREQ(message(contiguous_10_over_4(), 10, 3, 0).c_str(),
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

/// Shards of all ranks, each between guard elements that must survive.
template <class T>
std::vector<std::vector<T>> shard_all(const Layout& layout, const std::vector<T>& stream,
                                      int64_t row, T fill, T guard) {
  std::vector<std::vector<T>> shards;
  for (int r = 0; r < layout.cp(); ++r) {
    const auto size = static_cast<size_t>(layout.shard(r).slots * row);
    std::vector<T> guarded(size + 2, guard);
    shard_rows<T>(layout, r, stream, std::span(guarded).subspan(1, size), row, fill);
    RC_ASSERT(std::memcmp(&guarded.front(), &guard, sizeof(T)) == 0);
    RC_ASSERT(std::memcmp(&guarded.back(), &guard, sizeof(T)) == 0);
    shards.emplace_back(guarded.begin() + 1, guarded.end() - 1);
  }
  return shards;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Any bit pattern is a T, NaN and subnormal numbers too.
template <class T>
std::vector<T> random_bits(int64_t count, unsigned seed) {
  std::vector<T> values(static_cast<size_t>(count));
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
      const std::vector<T>& mine = shards[static_cast<size_t>(r)];
      const Ints index = shard_index(layout, r);
      for (size_t e = 0; e < mine.size(); ++e) {
        const int64_t slot = index[e / static_cast<size_t>(row)];
        const auto from = static_cast<size_t>(slot * row) + e % static_cast<size_t>(row);
        const T& expected = slot < slots ? stream[from] : fill;
        RC_ASSERT(std::memcmp(&mine[e], &expected, sizeof(T)) == 0);
      }
      unshard_rows<T>(layout, r, mine, back, row);
    }
    RC_ASSERT(same_bits(back, stream));
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
      std::vector<uint8_t> local(static_cast<size_t>(4 * run), 0), expected;
      shard_rows<uint8_t>(layout, r, stream, local);
      for (const int32_t slot : shard_index(layout, r))
        expected.push_back(stream[static_cast<size_t>(slot)]);
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
    std::vector<double> stream(static_cast<size_t>(slots * row));
    for (size_t i = 0; i < stream.size(); ++i) stream[i] = static_cast<double>(i);
    std::vector<double> back(stream.size(), -2), back_reference = back;
    for (int r = 0; r < c.layout.cp(); ++r) {
      std::vector<double> local(static_cast<size_t>(c.layout.shard(r).slots * row), -3);
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

}  // namespace
}  // namespace gyre
