// Documents packed on the device: the suite of every backend.

#include "slot_packer_cases.hpp"

namespace gyre::test::slot_packer {
GYRE_RUN_ON(device, SlotPackerTest);
}  // namespace gyre::test::slot_packer
