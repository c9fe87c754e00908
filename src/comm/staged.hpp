#pragma once
// Communication of device memory over MPI, staged through the host or by an MPI library that takes
// device memory. It needs no NCCL, and any number of ranks may share a GPU. Staged:
//
//     device -> pinned memory, on a copy stream, after the caller's work
//     pinned memory -> pinned memory, by MPI
//     pinned memory -> device; work submitted by the caller after wait_on_stream() or wait() runs
//                      after this copy

#include <memory>

#include "comm/communicator.hpp"

namespace gyre {

/// Returns a communicator of device memory over `host`, an MPI communicator, which must outlive it
/// and all communicators split from it. test() and wait() of any Work start MPI operations, in the
/// order of submission. Collective. Throws a runtime error in a build without CUDA.
std::unique_ptr<Communicator> make_staged_communicator(Communicator& host);

/// Like make_staged_communicator(), but passes device memory to MPI once the caller's earlier work
/// is done. Slices that are not contiguous are gathered on the device; bf16 reductions, which MPI
/// lacks, go through the host. `mpi` must pass its arrays to MPI unread, as
/// make_mpi_communicator()'s does. Collective. All ranks throw a runtime error if the MPI library
/// takes no GPU memory (mpi_takes_gpu_memory()), or in a build without CUDA.
std::unique_ptr<Communicator> make_gpu_aware_communicator(std::unique_ptr<Communicator> mpi);

}  // namespace gyre
