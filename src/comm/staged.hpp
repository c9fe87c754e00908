#pragma once
// Communication of device memory over MPI: staged through the host, or by an MPI library that takes
// device memory itself. It needs no NCCL, and any number of ranks may share a GPU. Staged:
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

/// The same without a copy on the host: MPI is given the device memory itself, when the caller's
/// work before is done. Slices that are not one span are gathered on the device; sums of bf16,
/// which MPI does not have, go by way of the host. `mpi` passes its arrays to MPI unread, as
/// make_mpi_communicator()'s does. Collective. All ranks throw a runtime error where the MPI
/// library takes no GPU memory (mpi_takes_gpu_memory()), or in a build without CUDA.
std::unique_ptr<Communicator> make_gpu_aware_communicator(std::unique_ptr<Communicator> mpi);

}  // namespace gyre
