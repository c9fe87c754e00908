#pragma once
// Which GPU a rank uses.

#include "comm/communicator.hpp"

namespace gyre {

/// Makes a device of its own the current one on every rank: its node-local rank, or the only one
/// that the launcher shows it. All ranks throw the same runtime error when one of them has none, or
/// when two would share one. Collective over `host`, an MPI communicator.
void bind_device(Communicator& host);

}  // namespace gyre
