#pragma once
// A parent process for every rank. It ends the run when the rank cannot: because the rank was
// killed, or is inside MPI_Init or MPI_Finalize, where no watchdog helps.
//
// Benefit: a run with a dead rank ends with exit code 3 on the launcher, and the report names the
// rank, its step and the signal. Without it, a launcher ends with the signal's number and kills the
// other ranks before they can report. Cost: one sleeping process per rank, which a signal can also
// hit. A killed supervisor is reported by its rank, which ends the run; a stopped one is continued
// by its rank.

#include <string_view>

namespace gyre {

/// Phase of a rank. While it runs, its Watchdog knows more than its supervisor.
enum class RankPhase { starting, running, finalising };

/// Must be called first, before MPI is initialised and before any thread is started; later calls do
/// nothing. Under an MPI launcher it forks: the child returns and becomes the rank; the parent
/// forwards signals and waits. When the child exits, the parent exits with the same code. The
/// parent ends the run with exit code
///   3  when a signal ended the child (the kernel's out-of-memory killer, a crash, kill -9), after
///      the other ranks had time to notice and to report what they were waiting for; when MPI
///      aborts; or when the launcher has ended;
///   4  when the child starts, finalises or is stopped for longer than the timeout.
/// A guard on each host (start_guard) removes files that MPI leaves in /dev/shm.
///
/// Does nothing without a launcher or under a debugger. Throws a runtime error if the process
/// cannot be started.
void start_supervised(std::string_view program, int argc, char** argv);

/// Inform the supervisor about its rank; no effect without a supervisor.
void tell_supervisor(RankPhase phase);
void tell_supervisor(std::string_view step, std::string_view waiting_for);
void tell_supervisor_timeout(double seconds);

/// State letter of a process on this host (R, S, T: stopped, Z, ...); 0 if there is none.
char process_state(int64_t pid);

}  // namespace gyre
