#pragma once
// The NCCL backend of Communicator. In a build without NCCL make_nccl_communicator throws.

#include <cstddef>
#include <memory>

#include "comm/communicator.hpp"

namespace gyre {

/// Whether NCCL allows several ranks on one GPU: from version 2.30, with
/// NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment.
bool nccl_shares_gpus();

/// Allocates all later device buffers by ncclMemAlloc, in multiples of 2 MiB. NCCL can register
/// this memory for windows and, with NCCL_GRAPH_REGISTER=1, for recorded operations; transfers then
/// need no copies through NCCL's buffers. NCCL hangs if one rank of an operation passes registered
/// memory and another does not; therefore all buffers of all ranks come from it, whatever their
/// size. Returns false without effect if NCCL is older than 2.19 or not in the build.
bool use_nccl_memory();

/// Returns a communicator over `host`, the MPI communicator of all ranks, on each rank's current
/// device (see cuda_device.hpp). Broadcasts the unique id over `host`, then runs a barrier, because
/// the broadcast may return before every rank has the id. Collective. All ranks throw the same
/// runtime error if one has no usable device, or two share one and nccl_shares_gpus() is false. An
/// error inside NCCL is not agreed: the rank that sees it has to abort the others.
///
/// The communicator and all split from it use one high-priority communication stream, in order of
/// submission: NCCL kernels of two communicators, started in different orders on two devices, would
/// deadlock. An operation starts after the work already on the caller's stream; work submitted to
/// that stream after Work::wait_on_stream() or wait() runs after the operation.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host);

}  // namespace gyre
