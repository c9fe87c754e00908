#pragma once
// Ends a run that hangs, and reports where.
//
// The main thread publishes what it is waiting for (a WaitScope); a watchdog thread checks it ten
// times a second. When one wait exceeds the timeout, the rank reports the step, the peers that it
// waits for and their state (running, stopped, gone), and ends the run with exit code 4. When a
// peer on this host has died, or the launcher or a library ends this rank, it reports the same and
// ends the run with exit code 3, without waiting for the timeout. OutputGuards remove unfinished
// output files.

#include <string>
#include <string_view>
#include <vector>

namespace gyre {

/// Name and default of every program's timeout option.
inline constexpr const char* timeout_option = "--timeout";
inline constexpr double default_timeout_seconds = 300;

/// Identity of a rank, for the watchdog's reports and look-ups.
struct PeerProcess {
  int world_rank = 0;
  std::string host;
  int64_t pid = 0;
};

class Watchdog {
 public:
  /// Starts the watchdog thread of this process. `peers` lists all ranks of the run, in world
  /// order. `timeout_seconds` 0 disables the timeout; peers are still watched. `end_all` ends all
  /// ranks with a code; if it returns, only this process ends.
  static void start(std::string program, int world_rank, std::vector<PeerProcess> peers,
                    double timeout_seconds, void (*end_all)(int code));
  static void set_timeout(double seconds);
  /// Marks the work of this rank as done; only reporting is left. Later signals that ask the run to
  /// end are ignored. If one has already come, this call never returns: the run is ending.
  static void begin_to_finish();
  static void stop();
};

/// During its lifetime, this process waits for `what` from `peers` (world ranks; empty: all).
/// Scopes nest; the innermost is reported. Cheap: no lock contention, and the clock as the only
/// system call.
class WaitScope {
 public:
  explicit WaitScope(std::string_view what, std::vector<int> peers = {});
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;
};

/// Sets the current step of the program ("layer 3 attention"), which reports of waits include.
void set_current_step(std::string step);
/// Returns the current step.
std::string current_step();

}  // namespace gyre
