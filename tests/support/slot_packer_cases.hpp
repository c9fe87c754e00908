#pragma once
// Documents packed into slots, on every backend.

#include <numeric>

#include "apps/common/packed_streams.hpp"
#include "backend_test.hpp"
#include "core/label.hpp"
#include "errors.hpp"
#include "packing/lengths.hpp"
#include "packing/slot_packer.hpp"

namespace gyre::test::slot_packer {

using Ints = std::vector<int32_t>;

using SlotPackerTest = BackendTest;

TEST_P(SlotPackerTest, EmptySegmentsAndPaddingAreSkipped) {
  // 9 slots for 5 tokens: segments without slots, one of padding alone, and one
  // that goes on at position 5.
  SegmentList segments;
  segments.add(0, 0, 0);
  segments.add(4, 2, 3);
  segments.add(0, 0, 5);
  segments.add(2, 0, 5);
  segments.add(3, 3, 0, 5);
  const SlotArrays slots = pack_slots(segments, Ints{10, 11, 12, 13, 14}, stream());
  const int32_t x = ignored_label;
  EXPECT_EQ(slots.ids, (Ints{13, 14, 0, 0, 0, 0, 10, 11, 12}));
  EXPECT_EQ(slots.labels, (Ints{14, x, x, x, x, x, 11, 12, x}));
  EXPECT_EQ(slots.positions, (Ints{0, 1, 2, 3, 0, 1, 5, 6, 7}));
}

TEST_P(SlotPackerTest, BinsAreThoseThatTheHostFills) {
  const std::vector<int64_t> lengths =
      draw_lengths(parse_length_spec("dist=long-tailed,count=60,max=200,seed=5"));
  const int64_t multiple = 6;
  PackedHeader header;
  set_bins(header, pack_documents(lengths, 600, multiple), 600, multiple);
  const TokenSource tokens = synthetic_tokens(3, 1000);
  const int64_t bins = header.bin_count();
  ASSERT_GT(bins, 3);
  const std::pair<int64_t, int64_t> ranges[] = {{0, bins}, {1, bins - 1}, {2, 2}};
  for (const auto& [first, last] : ranges) {
    const PackedSlots host = fill_slots(header, first, last, tokens);
    const PackedSlots device = fill_slots(header, first, last, tokens, stream());
    EXPECT_EQ(device.ids, host.ids);
    EXPECT_EQ(device.labels, host.labels);
    EXPECT_EQ(device.positions, host.positions);
  }
}

TEST_P(SlotPackerTest, LongSegmentsAreFilledInPieces) {
  const int32_t length = 2500, token = 7, position = 3;
  Ints tokens(token + length);
  std::iota(tokens.begin(), tokens.end(), 100);
  SegmentList segments;
  segments.add(2, 1, 0);
  segments.add(4000, length, token, position);
  const SlotArrays slots = pack_slots(segments, tokens, stream());
  ASSERT_EQ(slots.ids.size(), 4002U);
  for (int32_t p = 0; p < 4000; ++p) {
    EXPECT_EQ(slots.ids[p + 2], p < length ? 100 + token + p : 0) << p;
    EXPECT_EQ(slots.labels[p + 2], p + 1 < length ? 101 + token + p : ignored_label) << p;
    EXPECT_EQ(slots.positions[p + 2], position + p) << p;
  }
}

TEST_P(SlotPackerTest, SegmentsThatDoNotFitAreUsageErrors) {
  const auto pack = [&](int64_t slots, int32_t length, int64_t token) {
    SegmentList segments;
    segments.add(slots, length, token);
    pack_slots(segments, Ints{1, 2, 3}, stream());
  };
  expect_usage("segment 0: 3 real tokens in 2 slots; there are 0 to 2", [&] { pack(2, 3, 0); });
  expect_usage("segment 0: tokens 1 to 4 of 3", [&] { pack(4, 3, 1); });
}

TEST_P(SlotPackerTest, RowsAreGatheredAndOthersAreZero) {
  EXPECT_EQ(gather_embeddings(std::vector<float>{1, 2, 3, 4, 5, 6}, Ints{2, -1, 0, 2}, 2, stream()),
            (std::vector<float>{5, 6, 0, 0, 1, 2, 5, 6}));
}

}  // namespace gyre::test::slot_packer
