// Documents packed into slots on the host; on a device: tests/gpu/packing.cpp.

#include "packing/slot_packer.hpp"

#include "core/label.hpp"
#include "errors.hpp"
#include "packing/slot_source.hpp"
#include "slot_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using Ints = std::vector<int32_t>;

TEST(SlotSource, TheExampleOfTheHeader) {
  const std::vector<int64_t> first_slot = {0, 4, 6}, first_token = {10, 0};
  const Ints real = {3, 1}, first_position = {0, 7};
  const SegmentTable table{2, first_slot.data(), real.data(), first_token.data(),
                           first_position.data()};
  const int64_t token[] = {10, 11, 12, -1, 0, -1}, next[] = {11, 12, -1, -1, -1, -1};
  const int32_t position[] = {0, 1, 2, 3, 7, 8};
  for (int64_t slot = 0; slot < 6; ++slot) {
    const SlotSource source = slot_source(table, slot);
    EXPECT_EQ(source.token, token[slot]) << slot;
    EXPECT_EQ(source.next, next[slot]) << slot;
    EXPECT_EQ(source.position, position[slot]) << slot;
  }
}

class HostPacking : public testing::Test {
 protected:
  HostStream stream_;
  std::unique_ptr<SlotPacker> packer_ = make_slot_packer(stream_);
};

TEST_F(HostPacking, EverySlotIsThatOfItsSource) {
  const SegmentLists segments = test::segments_with_gaps();
  const Ints tokens = {10, 11, 12, 13, 14};
  const SlotArrays slots = packer_->pack(segments, tokens);
  const SegmentTable table{std::ssize(segments.real_length), segments.first_slot.data(),
                           segments.real_length.data(), segments.first_token.data(),
                           segments.first_position.data()};
  Ints ids, labels, positions;
  for (int64_t slot = 0; slot < segments.slots(); ++slot) {
    const SlotSource source = slot_source(table, slot);
    ids.push_back(source.token < 0 ? 0 : tokens[source.token]);
    labels.push_back(source.next < 0 ? ignored_label : tokens[source.next]);
    positions.push_back(source.position);
  }
  EXPECT_EQ(slots.ids, ids);
  EXPECT_EQ(slots.labels, labels);
  EXPECT_EQ(slots.positions, positions);
  EXPECT_EQ(ids, (Ints{13, 14, 0, 0, 0, 0, 10, 11, 12}));
}

TEST_F(HostPacking, SegmentsThatDoNotFitAreUsageErrors) {
  const Ints tokens = {1, 2, 3};
  const auto pack = [&](int64_t slots, int32_t length, int64_t token) {
    SegmentLists segments;
    segments.add(slots, length, token);
    packer_->pack(segments, tokens);
  };
  test::expect_usage("segment 0: 3 real tokens in 2 slots; there are 0 to 2",
                     [&] { pack(2, 3, 0); });
  test::expect_usage("segment 0: tokens 1 to 4 of 3", [&] { pack(4, 3, 1); });
}

TEST_F(HostPacking, RowsAreGatheredAndOthersAreZero) {
  const std::vector<float> rows = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(packer_->gather(rows, Ints{2, -1, 0, 2}, 2),
            (std::vector<float>{5, 6, 0, 0, 1, 2, 5, 6}));
}

}  // namespace GYRE_FILE
}  // namespace gyre
