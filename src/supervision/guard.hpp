#pragma once
// Guard of a rank: a small process that removes the rank's temporary files if the rank cannot.

#include <string>

namespace gyre {

/// Forks the guard. It acts when this process and its forks have ended in any way, including
/// SIGKILL; it has a session of its own, blocks all signals and holds no open files of this
/// process. ps shows it as gyre-guard, in place of the command line `argv`.
/// `removes_shared_memory`: when the parent of the guard has ended, too, the guard removes files
/// that MPI has left in /dev/shm (shared_memory.hpp). Throws a runtime error if it cannot be
/// started.
void start_guard(int argc, char** argv, bool removes_shared_memory);

/// Detaches a fork of this process from the guard: it no longer counts.
void leave_guard();

/// The guard will remove the file `path` when this process has ended. No effect without a guard.
void guard_file(const std::string& path);
/// The guard forgets `path`.
void release_file(const std::string& path);

}  // namespace gyre
