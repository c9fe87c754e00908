#pragma once
// Communication of device memory by way of the host, over MPI: needs no NCCL, and any number of
// ranks may share a GPU.
//
//     device -> pinned memory (on a copy stream, behind the caller's work)
//     MPI, from pinned memory to pinned memory
//     pinned memory -> device, and whatever the caller submits after wait_on_stream() or wait()
//     behind that

#include <memory>

#include "comm/communicator.hpp"

namespace gyre {

/// A communicator of device memory over `host`, an MPI communicator, which must outlive it and all
/// that are split from it. MPI operations are started in the order of submission, from test() or
/// wait() of any Work. Collective. Throws a runtime error in a build without CUDA.
std::unique_ptr<Communicator> make_staged_communicator(Communicator& host);

}  // namespace gyre
