#pragma once
// Repeated measurements: the number of repetitions and their times.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "core/error.hpp"
#include "machine/load.hpp"
#include "report/statistics.hpp"
#include "runtime/clock.hpp"

namespace gyre {

class OptionTable;

/// With `iterations` 0, repetition ends when the 95 % confidence interval of the median is within
/// ±2 % of it and 0.1 s are measured, or after `max_seconds`; there are 9 to 10000 repetitions.
struct RepeatOptions {
  int iterations = 0;
  double max_seconds = 1;
};

/// Adds -n,--iters (a number or auto) and --max-seconds. `what` is repeated: "Timed iterations".
void declare_repeats(OptionTable& table, const std::string& what, RepeatOptions& options);

/// Times of the repetitions of one configuration.
struct Timing {
  Samples samples_ms;  ///< [rank][iteration]
  /// CPU time over wall time of the measuring thread: the minimum over ranks. All waits poll, so it
  /// is 1 if the thread has a core of its own. NaN if a GPU computes or nothing computes.
  double cpu_share = 0;
  Statistics statistics() const { return summarize(slowest_rank(samples_ms)); }
};

/// Runs the repetitions of one measurement:
///
///     for (Repeats repeats(options, &world); repeats.next();) {
///       prepare(repeats.last());
///       repeats.time([&] { run(); });
///     }
///
/// Every rank does the same number of repetitions.
class Repeats {
 public:
  /// `world`: null if this rank measures alone. `owns_core`: the thread never sleeps meanwhile.
  Repeats(const RepeatOptions& options, Communicator* world, bool owns_core = true);

  /// Starts the next repetition; false after the last. Collective if there is a `world`.
  bool next();
  /// Whether this repetition is the last. This is known before it runs.
  bool last() const { return index_ + 1 == total_; }
  /// Index of the current repetition, from 0.
  int64_t index() const { return index_; }

  /// Times `body`.
  template <class Body>
  void time(Body&& body) {
    const double cpu = thread_cpu_seconds();
    const Stopwatch watch;
    body();
    const double seconds = watch.seconds();
    add(seconds, thread_cpu_seconds() - cpu);
  }

  /// Records a repetition: its wall time and the CPU time of the calling thread.
  void add(double seconds, double cpu_seconds) {
    cpu_seconds_ += cpu_seconds;
    wall_seconds_ += seconds;
    mine_ms_.push_back(1e3 * seconds);
  }

  /// Milliseconds of this rank's last repetition.
  double last_ms() const { return mine_ms_.back(); }
  /// The times of all repetitions so far. Collective if there is a `world`.
  Timing timing() const;

 private:
  /// Decides whether this repetition is the last, or when to decide again.
  void decide();
  std::vector<double> slowest_since_last_decision();

  RepeatOptions options_;
  Communicator* world_;
  bool owns_core_;
  Stopwatch since_start_;
  int64_t index_ = -1, total_ = 0, decide_at_ = 0;
  double cpu_seconds_ = 0, wall_seconds_ = 0;
  std::vector<double> mine_ms_;     // times of this rank
  std::vector<double> slowest_ms_;  // maximum over ranks, as far as known
};

/// With fewer samples, even their whole range is not a 95 % confidence interval of the median.
inline constexpr int64_t least_repetitions = 6;
inline constexpr double least_measured_seconds = 0.1;  ///< sum over repetitions
inline constexpr double max_variation = 0.2;           ///< CV of the slowest rank's times
inline constexpr double max_half_width = 0.05;         ///< half_width() of the median's interval
inline constexpr double least_cpu_share = 0.9;         ///< CPU time / wall time of each rank
inline constexpr double max_foreign_cores = 0.5;       ///< cores that other processes keep busy

/// The rules that a row can break, in the order in which they are reported.
enum class Rule { repetitions, duration, variation, interval, cpu_share };
struct Breach {
  Rule rule;
  double value;
};
/// The rules that `timing` breaks; none if it has no samples, because nothing was measured.
std::vector<Breach> breaches_of(const Timing& timing);
/// "noisy: CV 31.2 %, at most 20"
std::string text_of(const Breach& breach);
/// "noisy: CV 31.2 % in 3 of 12 rows, at most 20": a line for each rule that a row breaks, with
/// its worst value.
std::vector<std::string> breaches_text(const std::vector<const Timing*>& rows);

/// "noisy: other processes kept 1.0 of 2 cores of vm busy, at most 0.5", or "".
std::string breach_text(const ForeignLoad& load);

}  // namespace gyre
