#pragma once
// Documents packed into slots, on every backend.

#include "apps/common/packed_streams.hpp"
#include "backend_test.hpp"
#include "core/label.hpp"
#include "errors.hpp"
#include "packing/lengths.hpp"
#include "packing/slot_packer.hpp"

namespace gyre::test::slot_packer {

using Ints = std::vector<int32_t>;

class SlotPackerTest : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (!IsSkipped()) packer_ = make_slot_packer(stream());
  }
  SlotPacker& packer() { return *packer_; }

 private:
  std::unique_ptr<SlotPacker> packer_;
};

TEST_P(SlotPackerTest, EmptySegmentsAndPaddingAreSkipped) {
  // 9 slots for 5 tokens: segments without slots, one of padding alone, and one
  // that goes on at position 5.
  SegmentLists segments;
  segments.add(0, 0, 0);
  segments.add(4, 2, 3);
  segments.add(0, 0, 5);
  segments.add(2, 0, 5);
  segments.add(3, 3, 0, 5);
  const SlotArrays slots = packer().pack(segments, Ints{10, 11, 12, 13, 14});
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
    const PackedSlots device = fill_slots(header, first, last, tokens, packer());
    EXPECT_EQ(device.ids, host.ids);
    EXPECT_EQ(device.labels, host.labels);
    EXPECT_EQ(device.positions, host.positions);
  }
}

TEST_P(SlotPackerTest, SegmentsThatDoNotFitAreUsageErrors) {
  const auto pack = [&](int64_t slots, int32_t length, int64_t token) {
    SegmentLists segments;
    segments.add(slots, length, token);
    packer().pack(segments, Ints{1, 2, 3});
  };
  expect_usage("segment 0: 3 real tokens in 2 slots; there are 0 to 2", [&] { pack(2, 3, 0); });
  expect_usage("segment 0: tokens 1 to 4 of 3", [&] { pack(4, 3, 1); });
}

TEST_P(SlotPackerTest, RowsAreGatheredAndOthersAreZero) {
  EXPECT_EQ(packer().gather(std::vector<float>{1, 2, 3, 4, 5, 6}, Ints{2, -1, 0, 2}, 2),
            (std::vector<float>{5, 6, 0, 0, 1, 2, 5, 6}));
}

}  // namespace gyre::test::slot_packer
