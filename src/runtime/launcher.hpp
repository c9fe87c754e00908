#pragma once
// The connection of a rank to its launcher: PMI, over the descriptor that PMI_FD names.

#include <csignal>
#include <ctime>

namespace gyre {

/// Asks the launcher to end all ranks with `code` (one digit), by a message of PMI-1, and waits to
/// be ended. Unlike MPI_Abort it may be called by any thread, at any time, MPI initialised or not,
/// and in a signal handler. Returns when nothing happened: at once without such a connection, after
/// 2 s with one. A rank that ended by itself meanwhile would close the connection: Hydra answers
/// the other ranks' requests, does not find it, and ends with an exit code of its own.
void end_run_through_launcher(int code);

/// Waits until the launcher has read what was written (and flushed) to stdout and stderr, at most 1
/// s: when it ends a run it drops what it has not read.
void wait_for_launcher_to_read();

/// Whether the launcher has closed its end.
bool launcher_is_gone();

/// Stands between a rank and its launcher. MPI ends a run by an abort message with an exit code of
/// its own (MPI's error class), as the other ranks do at once when one dies in MPI_Init; whoever
/// stands in between keeps that message back.
class LauncherRelay {
 public:
  /// Makes the rank's connection. Before the fork. Throws a runtime error when it cannot.
  LauncherRelay();
  /// Lets MPI, in the rank, use the relay. The launcher's own connection stays open there, for
  /// end_run_through_launcher().
  void enter_rank();
  /// In the supervisor, once, before pass().
  void enter_supervisor();
  /// Passes on what either side says within `pause`; returns early for signals of `unblocked`, a
  /// mask as of ppoll. False when the rank has sent an abort message, which was not passed on.
  bool pass(const timespec& pause, const sigset_t& unblocked);

 private:
  int rank_end_ = -1, supervisor_end_ = -1;  // -1: without a launcher's connection
  bool rank_open_ = true, launcher_open_ = true;
};

}  // namespace gyre
