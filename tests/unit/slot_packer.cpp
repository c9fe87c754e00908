// Documents packed into slots on the host: the suite of every backend.

#include "packing/slot_source.hpp"
#include "slot_packer_cases.hpp"

namespace gyre::test::slot_packer {

GYRE_RUN_ON(host, SlotPackerTest);

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

}  // namespace gyre::test::slot_packer
