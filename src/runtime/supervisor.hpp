#pragma once
// A parent process for every rank. It ends the run when the rank cannot do so itself: because it
// was killed, or because it is inside MPI_Init or MPI_Finalize, where no watchdog helps.
//
// What it gives: a run with a dead rank ends with exit code 3 on the launcher, and the rank, what
// it was doing and the signal are named; without it a launcher ends with the signal's number, and
// kills the other ranks before they can report. What it costs: a process a rank that sleeps, and a
// second process that a signal can hit. A supervisor that is killed is reported by its rank, which
// ends the run; one that is stopped is continued by its rank.

#include <string_view>

namespace gyre {

/// Of the life of a rank. While it runs, its Watchdog knows more than its supervisor.
enum class RankPhase { starting, running, finalising };

/// Call it first of all, before MPI is initialised and before any thread is started; later calls do
/// nothing. Under an MPI launcher it forks: the child returns and becomes the rank; the parent
/// stays behind, forwards signals and waits. When the child exits, the parent exits with the same
/// code. It ends the run with exit code
///   3  when a signal ended the child (the kernel's out-of-memory killer, a crash, kill -9), after
///      the other ranks had time to notice and to report what they were waiting for; when MPI
///      aborts; or when the launcher is gone;
///   4  when the child starts, finalises or is stopped for longer than the timeout.
/// A guard_shared_memory() of this host removes what MPI leaves in /dev/shm.
///
/// Does nothing without a launcher, or under a debugger. Throws a runtime error when the process
/// cannot be started.
void start_supervised(std::string_view program, int argc, char** argv);

/// What the supervisor should know about its rank. Without a supervisor they do nothing.
void tell_supervisor(RankPhase phase);
void tell_supervisor(std::string_view step, std::string_view waiting_for);
void tell_supervisor_timeout(double seconds);

/// Continues the supervisor if it is stopped.
void wake_supervisor();

/// State letter of a process of this host (R, S, T: stopped, Z, ...), 0 when there is none.
char process_state(int64_t pid);

}  // namespace gyre
