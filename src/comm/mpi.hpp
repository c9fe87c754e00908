#pragma once
// The MPI backend of Communicator: host memory, non-blocking calls, waits that yield the core.

#include <mpi.h>

#include "comm/communicator.hpp"

namespace gyre {

/// A communicator over a duplicate of `world`, the communicator of all ranks (collective over it).
/// Smaller groups come from split().
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm world);

/// MPI handle, for HDF5, of a communicator made by make_mpi_communicator or split from one.
MPI_Comm mpi_handle(const Communicator& comm);

}  // namespace gyre
