#pragma once
// The run rules: when a measurement counts. docs/run-rules.md explains them.

#include <cstdint>
#include <string>
#include <vector>

#include "machine/load.hpp"
#include "report/repeat.hpp"

namespace gyre {

/// The range of fewer samples is not a 95 % confidence interval of the median.
inline constexpr int64_t least_repetitions = 6;
inline constexpr double least_measured_seconds = 0.1;  ///< sum over repetitions
inline constexpr double max_variation = 0.2;           ///< CV of the slowest ranks' times
inline constexpr double max_half_width = 0.05;         ///< half_width() of the median's interval
inline constexpr double least_cpu_share = 0.9;         ///< CPU time / wall time of each rank
inline constexpr double max_foreign_cores = 0.5;       ///< cores that other processes keep busy

/// The rules that a row can break, in the order in which they are reported.
enum class Rule { repetitions, duration, variation, interval, cpu_share };
struct Breach {
  Rule rule;
  double value;
};
/// Empty for a timing without samples: nothing was measured.
std::vector<Breach> breaches_of(const Timing& timing);
/// "noisy: CV 31.2 %, at most 20"
std::string text_of(const Breach& breach);
/// "noisy: CV 31.2 % in 3 of 12 rows, at most 20": a line for each rule that a row breaks, with
/// its worst value.
std::vector<std::string> breaches_text(const std::vector<const Timing*>& rows);

/// "noisy: other processes kept 1.0 of 2 cores of vm busy, at most 0.5", or "".
std::string breach_text(const ForeignLoad& load);

}  // namespace gyre
