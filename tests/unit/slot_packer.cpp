// Documents packed into slots on the host: the suite of every backend.

#include "slot_packer_cases.hpp"

namespace gyre::test::slot_packer {

GYRE_RUN_ON(host, SlotPackerTest);

TEST(SlotPacker, TheExampleOfTheHeader) {
  HostStream stream;
  SegmentList segments;
  segments.add(4, 3, 2);
  segments.add(2, 1, 0, 7);
  const SlotArrays slots = pack_slots(segments, Ints{0, 1, 10, 11, 12}, stream);
  EXPECT_EQ(slots.ids, (Ints{10, 11, 12, 0, 0, 0}));
  EXPECT_EQ(slots.labels,
            (Ints{11, 12, ignored_label, ignored_label, ignored_label, ignored_label}));
  EXPECT_EQ(slots.positions, (Ints{0, 1, 2, 3, 7, 8}));
}

}  // namespace gyre::test::slot_packer
