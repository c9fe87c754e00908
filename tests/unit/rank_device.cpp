// What ranks know of each other's devices, which needs none.

#include "comm/rank_device.hpp"

#include <gtest/gtest.h>

#include "core/error.hpp"

namespace gyre {
namespace GYRE_FILE {

/// Four ranks of one host, each with a device of its own.
std::vector<RankDevice> four_devices() {
  std::vector<RankDevice> devices;
  for (int r = 0; r < 4; ++r)
    devices.push_back({r, "node", r, "Test GPU", "GPU-" + std::to_string(r), 9, 0, 1});
  return devices;
}

TEST(SharedDevices, RanksWithADeviceEachAreFine) {
  EXPECT_NO_THROW(require_own_devices(four_devices()));
}

TEST(SharedDevices, TheErrorNamesRanksHostDeviceAndOption) {
  std::vector<RankDevice> devices = four_devices();
  devices[3] = {3, "node", 1, "Test GPU", "GPU-1", 9, 0, 2};
  devices[1].sharers = 2;
  devices[2].host = "other";  // the same number on another host is another device
  devices[2].device = 1;
  try {
    require_own_devices(devices);
    FAIL() << "two ranks have one device";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::runtime);
    EXPECT_STREQ(
        error.what(),
        "ranks 1, 3 on host node have one CUDA device, 1 Test GPU (9.0) (GPU-1); start one "
        "rank for each device, or let them share it with --share-gpus, for checking: its "
        "times are not official");
  }
}

TEST(Visibility, RanksThatSeeOneDeviceEachAreToldWhatToStart) {
  std::vector<RankDevice> devices = four_devices();
  for (RankDevice& device : devices) device.visible = 4;
  EXPECT_EQ(visibility_note(devices), "");
  for (RankDevice& device : devices) device.visible = 1;
  const std::string note = visibility_note(devices);
  EXPECT_EQ(note.find("ranks 0, 1, 2, 3 on host node see one GPU each"), 0U) << note;
  EXPECT_NE(note.find("srun --gpus-per-node=4 --gpu-bind=none"), std::string::npos) << note;
  for (RankDevice& device : devices) device.host += std::to_string(device.rank);
  EXPECT_EQ(visibility_note(devices), "") << "one rank on each host";
}

}  // namespace GYRE_FILE
}  // namespace gyre
