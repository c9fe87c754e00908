// Host memory over a communicator of device memory.

#include "comm/cuda_device.hpp"
#include "comm/host_staging.hpp"
#include "comm/staged.hpp"
#include "device_comm_cases.hpp"

namespace gyre::test {
namespace GYRE_FILE {

/// Keeps what the adapter is over.
struct HostStaging {
  static std::unique_ptr<Communicator> make(Communicator& mpi, Stream& stream) {
    bind_device(mpi, true);
    static std::unique_ptr<Communicator> device;
    device = make_staged_communicator(mpi);
    return make_host_staging_communicator(*device, stream);
  }
};
GYRE_TEST_DEVICE_COMM(HostStaging);

class HostStagingComm : public GpuTest {};

TEST_F(HostStagingComm, ItIsOfHostMemoryAndCountsWhatTheDevicesSent) {
  const auto device = make_staged_communicator(world());
  const auto host = make_host_staging_communicator(*device, stream());
  EXPECT_EQ(host->space(), MemorySpace::host);
  EXPECT_EQ(host->backend(), "staged");
  const std::vector<double> gathered = all_gather_value(*host, 1.5 + host->rank());
  for (int r = 0; r < host->size(); ++r) EXPECT_EQ(gathered[static_cast<size_t>(r)], 1.5 + r);
  EXPECT_EQ(host->traffic().bytes_sent, 8 * (host->size() - 1));
  EXPECT_EQ(device->traffic().bytes_sent, 8 * (host->size() - 1));
}

}  // namespace GYRE_FILE
}  // namespace gyre::test
