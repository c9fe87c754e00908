#pragma once
// Which GPU a rank uses.

#include <string>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

/// The GPU of one rank.
struct RankDevice {
  int rank = 0;
  std::string host;
  int device = 0;            ///< as CUDA counts on the rank's host, for this rank
  std::string name;          ///< "NVIDIA H100 80GB HBM3"
  std::string uuid;          ///< "GPU-00112233-...": the same device has the same one for all ranks
  int major = 0, minor = 0;  ///< compute capability
  int sharers = 1;           ///< ranks that use this device, this one included
};

/// The least compute capability that the kernels are made for: 8.0 (A100).
inline constexpr int least_compute_capability = 8;

/// Makes one device the current one of every rank and returns the devices of all ranks, in order of
/// rank. The ranks of a host are dealt over the devices that each of them sees, in order:
///
///     4 ranks, 4 devices: 0 1 2 3      4 ranks, 2 devices: 0 1 0 1 (share_gpus)
///     4 ranks that the launcher shows one device each: 0 0 0 0, told apart by UUID
///
/// All ranks throw the same runtime error when one has no driver, no device or a device below
/// compute capability 8.0, or when two use one device and `share_gpus` is not set. Collective over
/// `host`, an MPI communicator.
std::vector<RankDevice> bind_device(Communicator& host, bool share_gpus = false);

/// Throws the runtime error that names the ranks, their host and the device that they share, if
/// any do.
void require_own_devices(const std::vector<RankDevice>& devices);

/// "0 NVIDIA H100 80GB HBM3 (9.0)"
std::string to_string(const RankDevice& device);

/// The CUDA runtime's version, "13.0", or "software GPU".
std::string cuda_version();

}  // namespace gyre
