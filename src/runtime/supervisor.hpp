#pragma once
// A parent process for every rank, so that a rank that is killed still ends with a message and with
// exit code 3.

namespace gyre {

/// Call once, before MPI is initialised and before any thread is started. Under an MPI launcher it
/// forks: the child returns and becomes the rank, the parent stays behind, forwards signals and
/// waits. When the child exits, the parent exits with the same code. When a signal ends the child
/// (the kernel's out-of-memory killer, a crash, kill -9), the parent says so on stderr, leaves the
/// other ranks time to notice and to report what they were waiting for, and exits with code 3.
/// Otherwise a launcher would kill them at once and report a bare signal number. The child dies
/// with its parent.
///
/// Does nothing without a launcher, or under a debugger.
void start_supervised();

}  // namespace gyre
