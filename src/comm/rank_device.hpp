#pragma once
// The GPU of each rank, as known to all ranks.

#include <string>
#include <vector>

namespace gyre {

struct RankDevice {
  int rank = 0;
  std::string host;
  int device = 0;            ///< CUDA's device index in this rank's process
  std::string name;          ///< "NVIDIA H100 80GB HBM3"
  std::string uuid;          ///< "GPU-00112233-..."; equal on all ranks for one device
  int major = 0, minor = 0;  ///< compute capability
  int sharers = 1;           ///< ranks that use this device, this one included
  int visible = 1;           ///< number of devices visible to the rank
};

/// Whether two ranks use the same device.
bool same_device(const RankDevice& a, const RankDevice& b);

/// Throws a runtime error that names the ranks, host and device if several ranks share a device.
void require_own_devices(const std::vector<RankDevice>& devices);

/// Advice for launching where several ranks of a host see one device each: CUDA then has no direct
/// path between their devices, and NCCL's peer-to-peer copies fail or go through the host
/// (NVIDIA/nccl issue 1948). "" if there are no such ranks.
std::string visibility_note(const std::vector<RankDevice>& devices);

/// Index, name and compute capability, such as "0 NVIDIA H100 80GB HBM3 (9.0)".
std::string to_string(const RankDevice& device);

}  // namespace gyre
