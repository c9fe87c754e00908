#pragma once
// Parent process of a rank. It ends the run when the rank cannot: because the rank was killed, or
// is inside MPI_Init or MPI_Finalize, where no watchdog helps.
//
// Benefit: a run with a dead rank ends with exit code 3 on the launcher, and the report names the
// rank, its step and the signal. Without it, a launcher ends with the signal's number and kills the
// other ranks before they can report. Cost: one sleeping process per rank, which a signal can also
// hit. A killed supervisor is reported by its rank, which ends the run; a stopped one is continued
// by its rank.

#include <string_view>

namespace gyre {

/// Forks: the child returns and becomes the rank; the parent forwards signals and waits. When the
/// child exits, the parent exits with the same code. The parent ends the run with exit code
///   3  when a signal ended the child (the kernel's out-of-memory killer, a crash, kill -9), after
///      the other ranks had time to notice and to report what they were waiting for; when MPI
///      aborts; or when the launcher has ended;
///   4  when the child starts, finalises or is stopped for longer than the timeout, which may be
///      changed later (Surroundings).
/// Throws a runtime error if the process cannot be started.
void fork_supervised(std::string_view program, double timeout_seconds);

/// Whether this rank has a supervisor.
bool has_supervisor();

}  // namespace gyre
