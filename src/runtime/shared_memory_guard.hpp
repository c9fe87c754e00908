#pragma once
// Removes shared-memory files that MPI leaves when ranks are killed.

namespace gyre {

/// Starts the guard of this host: a process that waits until rank and supervisor of the caller have
/// ended in any way, then removes files in /dev/shm that MPICH or UCX have created since the start
/// of the run and that no process has open or mapped. Call once per host (on its first rank),
/// before the rank is forked; the guard waits only for forks of the caller. The guard is detached
/// from the launcher's process group and holds none of its connections. `argv` are the arguments of
/// main; the guard overwrites its own copy with its name. Does nothing without /dev/shm, or if no
/// process can be started.
void guard_shared_memory(int argc, char** argv);

}  // namespace gyre
