#pragma once
// The NCCL backend of Communicator and the CUDA stream under it. Built when nvcc and NCCL are
// there; a machine without a usable GPU gets a clear error from make_nccl_communicator, exit
// code 3.

#include <memory>
#include <string>

#include "comm/communicator.hpp"

struct CUstream_st;  // cudaStream_t points to it

namespace gyre {

/// Number of usable CUDA devices; 0 without a driver. `why` receives the reason when it is 0.
int usable_cuda_devices(std::string* why = nullptr);

/// A new CUDA stream on the current device. It must outlive the Works submitted with it.
std::unique_ptr<Stream> make_cuda_stream();

/// The cudaStream_t of a stream made by make_cuda_stream, for kernel launches and copies.
CUstream_st* cuda_handle(const Stream& stream);

/// A communicator over `host`, the MPI communicator of all ranks, one GPU a rank: device =
/// node-local rank, or the only device that the launcher shows this rank. It becomes the current
/// device of the calling thread. The unique id is broadcast over `host`, followed by a barrier (the
/// broadcast may return before every rank has the id). Collective; all ranks throw the same error
/// when any has no device or two would share one. An error inside NCCL is not agreed: the rank that
/// sees it has to abort the others.
///
/// The communicator and all that are split from it run on one communication stream of high
/// priority, in the order of submission: NCCL kernels of two communicators, started in different
/// orders on two devices, would wait for each other for ever. An operation starts after the work
/// already on the caller's stream, and work submitted to that stream after Work::wait() comes after
/// the operation.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host);

}  // namespace gyre
