#pragma once
// Files of shared memory that MPI leaves behind when ranks are killed.

namespace gyre {

/// Starts the guard of this host: a process that waits until rank and supervisor of the caller have
/// ended, in whatever way, and then removes the files in /dev/shm that MPICH or UCX have created
/// since the start of the run and that no process has open or mapped. Call it once on each host
/// (on the first rank of the host), before the rank is forked; only a fork of the caller keeps
/// the guard waiting. The guard is detached from the launcher's process group and holds none of its
/// connections. `argv` are the arguments of main: the guard replaces its own copy by its name.
/// Without a /dev/shm, or when no process can be started, it does nothing.
void guard_shared_memory(int argc, char** argv);

}  // namespace gyre
