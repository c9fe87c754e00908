#include "comm/cuda_device.hpp"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/agree.hpp"
#include "comm/mpi.hpp"
#include "core/error.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/host.hpp"
#include "runtime/mpi_env.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// The ranks of a communicator that share a host.
class HostGroup {
 public:
  explicit HostGroup(Communicator& host) {
    const WaitScope scope("finding the ranks of this host");
    check_mpi(MPI_Comm_split_type(mpi_handle(host), MPI_COMM_TYPE_SHARED, host.rank(),
                                  MPI_INFO_NULL, &comm_),
              "MPI_Comm_split_type");
    check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  }
  ~HostGroup() { MPI_Comm_free(&comm_); }
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Everyone's `mine`, in rank order.
  template <class T>
  std::vector<T> gather(const T& mine) const {
    static_assert(std::is_trivially_copyable_v<T>);
    const WaitScope scope("gathering from the ranks of this host");
    constexpr int bytes = sizeof(T);
    std::vector<T> all(static_cast<size_t>(size_));
    std::vector<MPI_Request> requests(1);
    check_mpi(
        MPI_Iallgather(&mine, bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, comm_, requests.data()),
        "MPI_Iallgather");
    wait_politely(requests);
    return all;
  }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
};

/// The device that a rank uses, identified as no index can: launchers renumber devices for a rank.
struct DeviceClaim {
  int rank = 0;
  int device = 0;
  std::array<char, 16> uuid{};
};

DeviceClaim claim_device(const HostGroup& group, int rank) {
  std::string why;
  const int devices = usable_cuda_devices(&why);
  if (devices == 0) throw_runtime("no usable CUDA device on host {}: {}", host_name(), why);
  if (devices > 1 && group.rank() >= devices)
    throw_runtime("{} ranks on host {} have {} CUDA devices, and NCCL needs one for each",
                  group.size(), host_name(), devices);
  DeviceClaim claim{rank, devices == 1 ? 0 : group.rank(), {}};
  cudaDeviceProp properties{};
  GYRE_CHECK_CUDA(cudaGetDeviceProperties(&properties, claim.device));
  std::memcpy(claim.uuid.data(), properties.uuid.bytes, claim.uuid.size());
  return claim;
}

void require_own_device(const DeviceClaim& mine, const std::vector<DeviceClaim>& claims) {
  for (const DeviceClaim& other : claims)
    if (other.rank != mine.rank && other.uuid == mine.uuid)
      throw_runtime("ranks {} and {} on host {} have one CUDA device, and NCCL needs one for each",
                    std::min(mine.rank, other.rank), std::max(mine.rank, other.rank), host_name());
}

}  // namespace

void bind_device(Communicator& host) {
  const HostGroup group(host);
  DeviceClaim mine;
  run_agreed(host, "choosing a CUDA device", [&] { mine = claim_device(group, host.rank()); });
  const std::vector<DeviceClaim> claims = group.gather(mine);
  run_agreed(host, "choosing a CUDA device", [&] {
    require_own_device(mine, claims);
    GYRE_CHECK_CUDA(cudaSetDevice(mine.device));
  });
}

}  // namespace gyre
