// Documents packed on the device: against the slots that the host fills.

#include "apps/pack/cuda_packing.hpp"
#include "core/label.hpp"
#include "errors.hpp"
#include "gpu_test.hpp"
#include "packing/cuda_packing.hpp"
#include "packing/lengths.hpp"
#include "packing/slot_source.hpp"

namespace gyre {
namespace {

using Ints = std::vector<int32_t>;

TEST(SlotSource, TheExampleOfTheHeader) {
  const std::vector<int64_t> first_slot = {0, 4, 6}, first_token = {10, 0};
  const Ints real = {3, 1};
  const SegmentTable table{2, first_slot.data(), real.data(), first_token.data()};
  const int64_t token[] = {10, 11, 12, -1, 0, -1}, next[] = {11, 12, -1, -1, -1, -1};
  const int32_t position[] = {0, 1, 2, 3, 0, 1};
  for (int64_t slot = 0; slot < 6; ++slot) {
    const SlotSource source = slot_source(table, slot);
    EXPECT_EQ(source.token, token[slot]) << slot;
    EXPECT_EQ(source.next, next[slot]) << slot;
    EXPECT_EQ(source.position, position[slot]) << slot;
  }
}

class Packing : public test::GpuTest {};

TEST_F(Packing, EmptySegmentsAndPaddingAreSkipped) {
  SegmentLists segments;
  segments.add(0, 0, 0);  // no slots
  segments.add(4, 2, 3);
  segments.add(0, 0, 5);
  segments.add(2, 0, 5);  // padding alone
  segments.add(3, 3, 0);
  const Ints tokens = {10, 11, 12, 13, 14};
  const DeviceSlots there = pack_slots_on_device(segments, tokens, stream());
  const int32_t x = ignored_label;
  EXPECT_EQ(to_host(there.ids), (Ints{13, 14, 0, 0, 0, 0, 10, 11, 12}));
  EXPECT_EQ(to_host(there.labels), (Ints{14, x, x, x, x, x, 11, 12, x}));
  EXPECT_EQ(to_host(there.positions), (Ints{0, 1, 2, 3, 0, 1, 0, 1, 2}));
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
    const PackedSlots device = fill_slots_on_device(header, first, last, tokens, stream());
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
    pack_slots_on_device(segments, tokens, stream());
  };
  test::expect_usage("segment 0: 3 real tokens in 2 slots; there are 0 to 2",
                     [&] { pack(2, 3, 0); });
  test::expect_usage("segment 0: tokens 1 to 4 of 3", [&] { pack(4, 3, 1); });
}

}  // namespace
}  // namespace gyre
