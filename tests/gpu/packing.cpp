// Documents packed on the device: against the slots that the host fills.

#include "apps/common/packed_streams.hpp"
#include "core/label.hpp"
#include "errors.hpp"
#include "gpu_test.hpp"
#include "packing/lengths.hpp"
#include "packing/slot_packer.hpp"
#include "slot_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using Ints = std::vector<int32_t>;

class Packing : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) packer_ = make_slot_packer(stream());
  }
  SlotPacker& packer() { return *packer_; }

 private:
  std::unique_ptr<SlotPacker> packer_;
};

TEST_F(Packing, EmptySegmentsAndPaddingAreSkipped) {
  const SegmentLists segments = test::segments_with_gaps();
  const Ints tokens = {10, 11, 12, 13, 14};
  const SlotArrays slots = packer().pack(segments, tokens);
  const int32_t x = ignored_label;
  EXPECT_EQ(slots.ids, (Ints{13, 14, 0, 0, 0, 0, 10, 11, 12}));
  EXPECT_EQ(slots.labels, (Ints{14, x, x, x, x, x, 11, 12, x}));
  EXPECT_EQ(slots.positions, (Ints{0, 1, 2, 3, 0, 1, 5, 6, 7}));
}

TEST_F(Packing, BinsAreThoseThatTheHostFills) {
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

TEST_F(Packing, SegmentsThatDoNotFitAreUsageErrors) {
  const Ints tokens = {1, 2, 3};
  const auto pack = [&](int64_t slots, int32_t length, int64_t token) {
    SegmentLists segments;
    segments.add(slots, length, token);
    packer().pack(segments, tokens);
  };
  test::expect_usage("segment 0: 3 real tokens in 2 slots; there are 0 to 2",
                     [&] { pack(2, 3, 0); });
  test::expect_usage("segment 0: tokens 1 to 4 of 3", [&] { pack(4, 3, 1); });
}

TEST_F(Packing, RowsAreGatheredAndOthersAreZero) {
  const std::vector<float> rows = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(packer().gather(rows, Ints{2, -1, 0, 2}, 2),
            (std::vector<float>{5, 6, 0, 0, 1, 2, 5, 6}));
}

}  // namespace GYRE_FILE
}  // namespace gyre
