#pragma once
// Which GPU a rank uses. In a build without CUDA bind_device throws.

#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/rank_device.hpp"

namespace gyre {

/// The least compute capability that the kernels are made for: 8.0 (A100).
inline constexpr int least_compute_capability = 8;

/// Makes one device the current one of every rank and returns the devices of all ranks, in order of
/// rank. The ranks of a host are dealt over the devices that each of them sees, in order:
///
///     4 ranks, 4 devices: 0 1 2 3      4 ranks, 2 devices: 0 1 0 1 (share_gpus)
///     4 ranks that the launcher shows one device each: 0 0 0 0, told apart by UUID
///
/// All ranks throw the same runtime error when one has no driver, no device or a device below
/// compute capability 8.0, when two use one device and `share_gpus` is not set, or when the build
/// has no CUDA. Collective over `host`, an MPI communicator.
std::vector<RankDevice> bind_device(Communicator& host, bool share_gpus = false);

/// The CUDA runtime's version, "13.0", or "software GPU (seed 7)"; "no" in a build without CUDA.
std::string cuda_version();

}  // namespace gyre
