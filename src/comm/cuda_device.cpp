#include "comm/cuda_device.hpp"

#include <fmt/format.h>
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

#ifdef GYRE_SOFTGPU
#include <softgpu_progress.h>
#endif

namespace gyre {
namespace {

/// Rank of this process among the processes of its host.
int rank_on_host(Communicator& host) {
  const WaitScope scope("finding the ranks of this host");
  MPI_Comm group = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(mpi_handle(host), MPI_COMM_TYPE_SHARED, host.rank(), MPI_INFO_NULL,
                                &group),
            "MPI_Comm_split_type");
  int rank = 0;
  check_mpi(MPI_Comm_rank(group, &rank), "MPI_Comm_rank");
  MPI_Comm_free(&group);
  return rank;
}

/// Contents of a RankDevice in the form that ranks exchange.
struct Claim {
  std::array<char, 256> host{}, name{};
  std::array<unsigned char, 16> uuid{};
  int device = 0, visible = 0, major = 0, minor = 0;
};

Claim claim_device(const std::function<int(int)>& choose) {
  std::string why;
  const int devices = usable_cuda_devices(&why);
  if (devices == 0) throw_runtime("no usable CUDA device on host {}: {}", host_name(), why);
  Claim claim;
  claim.device = choose(devices);
  claim.visible = devices;
  cudaDeviceProp properties{};
  GYRE_CHECK_CUDA(cudaGetDeviceProperties(&properties, claim.device));
  if (properties.major < least_compute_capability)
    throw_runtime("CUDA device {} of host {} ({}) has compute capability {}.{}; the least is {}.0",
                  claim.device, host_name(), properties.name, properties.major, properties.minor,
                  least_compute_capability);
  const std::string host = host_name();
  std::copy_n(host.data(), std::min(host.size(), claim.host.size() - 1), claim.host.data());
  std::memcpy(claim.name.data(), properties.name, claim.name.size() - 1);
  std::memcpy(claim.uuid.data(), properties.uuid.bytes, claim.uuid.size());
  claim.major = properties.major;
  claim.minor = properties.minor;
  return claim;
}

std::string uuid_text(const std::array<unsigned char, 16>& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < uuid.size(); ++i)
    text += fmt::format("{}{:02x}", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
  return text;
}

}  // namespace

std::vector<RankDevice> devices_of_ranks(Communicator& host,
                                         const std::function<int(int)>& choose) {
  Claim mine;
  run_agreed(host, "choosing a CUDA device", [&] { mine = claim_device(choose); });
  std::vector<RankDevice> devices;
  for (const Claim& claim : all_gather_value(host, mine))
    devices.push_back({.rank = static_cast<int>(devices.size()),
                       .host = claim.host.data(),
                       .device = claim.device,
                       .name = claim.name.data(),
                       .uuid = uuid_text(claim.uuid),
                       .major = claim.major,
                       .minor = claim.minor,
                       .visible = claim.visible});
  for (RankDevice& device : devices)
    device.sharers = static_cast<int>(
        std::count_if(devices.begin(), devices.end(),
                      [&](const RankDevice& other) { return same_device(device, other); }));
  return devices;
}

std::vector<RankDevice> bind_device(Communicator& host, bool share_gpus) {
  const int rank_here = rank_on_host(host);
  std::vector<RankDevice> devices =
      devices_of_ranks(host, [=](int visible) { return rank_here % visible; });
  run_agreed(host, "choosing a CUDA device", [&] {
    if (!share_gpus) require_own_devices(devices);
    GYRE_CHECK_CUDA(cudaSetDevice(devices[host.rank()].device));
  });
  return devices;
}

std::string cuda_version() {
#ifdef GYRE_SOFTGPU
  return fmt::format("software GPU (seed {})", softgpu::seed());
#else
  int version = 0;
  GYRE_CHECK_CUDA(cudaRuntimeGetVersion(&version));
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
#endif
}

}  // namespace gyre
