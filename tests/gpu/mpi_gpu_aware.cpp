// Communication of device memory by an MPI library that takes it. The software GPU's does with
// GYRE_SOFTGPU_MPI=1, as these tests are started; where MPI does not, they are skipped.

#include "comm/cuda_device.hpp"
#include "comm/mpi.hpp"
#include "comm/staged.hpp"
#include "core/error.hpp"
#include "device_comm_cases.hpp"
#include "runtime/mpi_env.hpp"

namespace gyre::test {
namespace GYRE_FILE {

std::unique_ptr<Communicator> make_gpu_aware() {
  return make_gpu_aware_communicator(make_mpi_communicator(mpi_handle(world())));
}

struct GpuAware {
  static std::unique_ptr<Communicator> make(Communicator& mpi, Stream&) {
    bind_device(mpi, true);
    return make_gpu_aware();
  }
};
GYRE_TEST_DEVICE_COMM(GpuAware);

class GpuAwareComm : public GpuTest {};

TEST_F(GpuAwareComm, IsRefusedOnAllRanksWhereMpiTakesNoGpuMemory) {
  std::string message;
  try {
    const auto comm = make_gpu_aware();
    EXPECT_EQ(comm->backend(), "mpi-gpu");
    EXPECT_EQ(comm->space(), MemorySpace::device);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::runtime);
    EXPECT_TRUE(error.agreed());
    message = error.what();
  }
  EXPECT_EQ(message.find("takes no GPU memory") == std::string::npos, mpi_takes_gpu_memory());
}

TEST_F(GpuAwareComm, StartsBehindTheWorkOfTheCallerAndEndsBeforeWhatFollows) {
  if (!mpi_takes_gpu_memory()) GTEST_SKIP() << "this MPI takes no GPU memory";
  const auto comm = make_gpu_aware();
  const int n = comm->size(), next = (comm->rank() + 1) % n, previous = (comm->rank() + n - 1) % n;
  constexpr int64_t count = 1000;
  Buffer<std::byte> from(count, MemorySpace::device), to(count, MemorySpace::device);
  for (int round = 1; round <= 3; ++round) {
    // Nothing of it has run when the message is submitted.
    stream().fill(from.data(), std::byte(10 * round + comm->rank()), count);
    stream().fill(to.data(), std::byte{0xee}, count);
    const SendSlice sends[] = {{next, from.span()}};
    const RecvSlice recvs[] = {{previous, to.span()}};
    const WorkPtr work = comm->exchange(sends, recvs, stream(), "a round");
    work->wait_on_stream();
    stream().copy(from.data(), to.data(), count);
    const std::vector<std::byte> result = to_host(from);
    work->wait();
    EXPECT_EQ(result, std::vector<std::byte>(count, std::byte(10 * round + previous)));
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre::test
