#pragma once
// The GPU of a rank, as all ranks know it.

#include <string>
#include <vector>

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
  int visible = 1;           ///< devices that the rank sees
};

/// Whether two ranks have one device.
bool same_device(const RankDevice& a, const RankDevice& b);

/// Throws the runtime error that names the ranks, their host and the device that they share, if
/// any do.
void require_own_devices(const std::vector<RankDevice>& devices);

/// What to start differently where several ranks of a host see one device each, and not that of
/// another: CUDA then has no way from one of them to the other, and NCCL's peer-to-peer copies fail
/// or go through the host (NVIDIA/nccl issue 1948). "" where there are none.
std::string visibility_note(const std::vector<RankDevice>& devices);

/// "0 NVIDIA H100 80GB HBM3 (9.0)"
std::string to_string(const RankDevice& device);

}  // namespace gyre
