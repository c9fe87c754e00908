#pragma once
// Communication of device memory staged through the host, over MPI. It needs no NCCL, and any
// number of ranks may share a GPU.
//
//     device -> pinned memory, on a copy stream, after the caller's work
//     pinned memory -> pinned memory, by MPI
//     pinned memory -> device; work that the caller submits after wait_on_stream() or wait() runs
//                      after this copy

#include <memory>

#include "comm/communicator.hpp"

namespace gyre {

/// A communicator of device memory over `host`, an MPI communicator, which must outlive it and all
/// communicators split from it. MPI operations are started in the order of submission, from test()
/// or wait() of any Work. Collective. Throws a runtime error in a build without CUDA.
std::unique_ptr<Communicator> make_staged_communicator(Communicator& host);

}  // namespace gyre
