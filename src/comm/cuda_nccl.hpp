#pragma once
// The NCCL backend of Communicator and the CUDA stream under it. Built when nvcc and NCCL are there; a machine
// without a usable GPU gets a clear error from make_nccl_communicator, exit code 3.

#include <memory>

#include "comm/communicator.hpp"

namespace gyre {

/// Number of usable CUDA devices; 0 without a driver. `why` receives the reason when it is 0.
int usable_cuda_devices(std::string* why = nullptr);

/// A new CUDA stream on the current device.
std::unique_ptr<Stream> make_cuda_stream();

/// A communicator over the ranks of `host`, an MPI communicator, one GPU a rank: device = node-local rank. The unique id is
/// broadcast over `host`, followed by a barrier (the broadcast may return before every rank has the id).
/// Collective; all ranks throw the same error when any has no device or two would share one.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host);

}  // namespace gyre
