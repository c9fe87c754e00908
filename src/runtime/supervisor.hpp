#pragma once
// A parent for every rank, so that a rank that is killed still ends with a message and an exit code
// of the design.

namespace gyre {

/// Call once, before MPI is initialised and before any thread is started. Under an MPI launcher it
/// forks: the child returns and becomes the rank, the parent stays behind, forwards signals and
/// waits. When the child ends by itself, so does the parent, with its exit code. When a signal ends
/// it (the kernel's out-of-memory killer, a crash, kill -9), the parent says so on stderr, leaves
/// the other ranks the time to notice and to report what they were waiting for, and ends with exit
/// code 3; a launcher would otherwise kill them at once and answer with a bare signal number. The
/// child dies with its parent.
///
/// Does nothing without a launcher, or under a debugger.
void start_supervised();

}  // namespace gyre
