#pragma once
// The NCCL backend of Communicator. In a build without NCCL make_nccl_communicator throws.

#include <cstddef>
#include <memory>

#include "comm/communicator.hpp"

namespace gyre {

/// Whether NCCL takes several ranks on one GPU: it does from 2.30 on, when
/// NCCL_MULTI_RANK_GPU_ENABLE=1 is in the environment.
bool nccl_shares_gpus();

/// Large arrays of devices come from NCCL from now on, which can register their memory, as it does
/// by itself with what recorded operations use (NCCL_GRAPH_REGISTER): they then move without copies
/// through NCCL's buffers. `least_bytes`: of a block that is large; NCCL's take multiples of 2 MiB.
/// False, and nothing happens, where NCCL is older than 2.19 or not built.
bool use_nccl_memory(size_t least_bytes = size_t{2} << 20);

/// A communicator over `host`, the MPI communicator of all ranks, on the current device of each
/// (see cuda_device.hpp). The unique id is broadcast over `host`, followed by a barrier (the
/// broadcast may return before every rank has the id). Collective. All ranks throw the same runtime
/// error when one of them has no usable device, or when two have one and nccl_shares_gpus() is
/// false. An error inside NCCL is not agreed: the rank that sees it has to abort the others.
///
/// The communicator and all that are split from it run on one communication stream of high
/// priority, in the order of submission: NCCL kernels of two communicators, started in different
/// orders on two devices, would wait for each other for ever. An operation starts after the work
/// already on the caller's stream, and work submitted to that stream after Work::wait_on_stream()
/// or wait() comes after the operation.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host);

}  // namespace gyre
