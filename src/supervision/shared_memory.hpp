#pragma once
// Files that MPI libraries leave in /dev/shm when ranks are killed.

#include <sys/types.h>

#include <ctime>

namespace gyre {

/// Removes files of this user in /dev/shm that MPICH or UCX have created since `since` and that no
/// process has open or mapped. The ranks of a host end at about the same time and the launcher
/// after them, so it looks for files until the launcher has ended, for at most 2 s.
void remove_shared_memory(time_t since, pid_t launcher);

}  // namespace gyre
