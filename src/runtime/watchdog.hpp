#pragma once
// Ends a run that hangs, and reports where.
//
// The main thread publishes what it is waiting for (a WaitScope); a watchdog thread looks at it ten
// times a second. When one wait lasts longer than the timeout, the rank reports the step, the peers
// that it waits for and their state (running, stopped, gone), and ends the run with exit code 4.
// When a peer on this host has died, or the launcher or a library ends this rank, it reports the
// same and ends the run with exit code 3, without waiting for the timeout. Unfinished
// output files are removed by their OutputGuard.

#include <string>
#include <string_view>
#include <vector>

namespace gyre {

/// Of every program: the option for the timeout, and its default.
inline constexpr const char* timeout_option = "--timeout";
inline constexpr double default_timeout_seconds = 300;

/// How the watchdog names and looks up a rank.
struct PeerProcess {
  int world_rank = 0;
  std::string host;
  int64_t pid = 0;
};

class Watchdog {
 public:
  /// Starts the watchdog thread of this process. `peers` lists all ranks of the run, in world
  /// order. `timeout_seconds` 0 means never; peers are watched all the same. `end_all` ends all
  /// ranks with a code; if it returns, only this process ends.
  static void start(std::string program, int world_rank, std::vector<PeerProcess> peers,
                    double timeout_seconds, void (*end_all)(int code));
  static void set_timeout(double seconds);
  /// The work of this rank is done; what is left is to say so. From now on signals that ask the
  /// run to end are ignored. When one has come before, this never returns: the run is ending.
  static void begin_to_finish();
  static void stop();
};

/// For its lifetime, this process waits for `what` from `peers` (world ranks; empty: all of them).
/// Scopes nest; the innermost is reported. Cheap: no lock when uncontended, no system call but the
/// clock.
class WaitScope {
 public:
  explicit WaitScope(std::string_view what, std::vector<int> peers = {});
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;
};

/// Names the step that the program is in ("layer 3 attention"); waits are reported with it.
void set_current_step(std::string step);
/// What it was set to last.
std::string current_step();

}  // namespace gyre
