#pragma once
// Selects the GPU of a rank. In a build without CUDA, bind_device throws.

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/rank_device.hpp"

namespace gyre {

/// Minimum compute capability of the kernels: 8.0 (A100).
inline constexpr int least_compute_capability = 8;

/// Makes one device current on every rank and returns the devices of all ranks, in rank order. The
/// ranks of a host take the visible devices in order, round robin:
///
///     4 ranks, 4 devices: 0 1 2 3      4 ranks, 2 devices: 0 1 0 1 (share_gpus)
///     4 ranks with one visible device each: 0 0 0 0, told apart by UUID
///
/// All ranks throw the same runtime error when one has no driver, no device or a device below
/// compute capability 8.0, when two use one device and `share_gpus` is false, or when the build has
/// no CUDA. Collective over `host`, an MPI communicator.
std::vector<RankDevice> bind_device(Communicator& host, bool share_gpus = false);

/// Devices of all ranks, in rank order. `choose` maps the number that this rank sees to the index
/// of its own. All ranks throw a runtime error if a device is missing or too old. Collective.
std::vector<RankDevice> devices_of_ranks(Communicator& host, const std::function<int(int)>& choose);

/// CUDA runtime version: "13.0", "software GPU (seed 7)", or "no" in a build without CUDA.
std::string cuda_version();

}  // namespace gyre
