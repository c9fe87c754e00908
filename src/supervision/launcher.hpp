#pragma once
// Connection of a rank to its launcher: PMI over the file descriptor in PMI_FD.

#include <csignal>
#include <ctime>

namespace gyre {

/// Asks the launcher to end all ranks with `code` (one digit) by a PMI-1 message, and waits to be
/// ended. Unlike MPI_Abort, any thread or signal handler may call it at any time, with MPI
/// initialised or not. Returns if nothing happens: at once without a connection, after 2 s with
/// one. The wait keeps the connection open: if the rank exited, Hydra would fail to answer it and
/// end with an exit code of its own.
void end_run_through_launcher(int code);

/// Waits, at most 1 s, until the launcher has read everything written and flushed to stdout and
/// stderr. A launcher that ends a run drops unread output.
void wait_for_launcher_to_read();

/// Whether the launcher has closed its end of the connection.
bool launcher_is_gone();

/// Relays messages between a rank and its launcher, except for the rank's abort message. By that
/// message MPI ends the run with an exit code of MPI's own (its error class). If a rank dies in
/// MPI_Init, MPI in the other ranks sends it at once.
class LauncherRelay {
 public:
  /// Connects the rank to the relay, before the fork. Throws a runtime error on failure.
  LauncherRelay();
  /// Makes MPI in the rank use the relay. The launcher's own connection stays open there, for
  /// end_run_through_launcher().
  void enter_rank();
  /// Must be called once in the supervisor, before pass().
  void enter_supervisor();
  /// Waits at most `pause` for messages of either side, and forwards those that have arrived.
  /// `unblocked` is the signal mask of the wait, as in ppoll; a signal ends it. Returns false if
  /// the rank has sent an abort message, which is not forwarded.
  bool pass(const timespec& pause, const sigset_t& unblocked);

 private:
  int rank_end_ = -1, supervisor_end_ = -1;  // -1: no connection to a launcher
  bool rank_open_ = true, launcher_open_ = true;
};

}  // namespace gyre
