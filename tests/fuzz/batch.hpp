#pragma once
// Runs cases in child processes, many in each, so that a crash or a hang is one case's.

#include <string>

#include "target.hpp"

namespace gyre::fuzz {

/// How a case ended.
enum class End {
  accepted,
  refused,  ///< by an Error; or HDF5 crashed, and the program named the file: exit code 3
  timeout,  ///< ended by the watchdog, as a run would be: exit code 4
  signal,
  hang,
  other,  ///< another exception, or a failed GYRE_CHECK: neither says what is wrong with the input
  wrong,  ///< accepted, with other data than was written
};
constexpr int ends = 7;
std::string to_string(End end);

struct Found {
  uint64_t index;
  End end;
  std::string message;
};

struct Tally {
  uint64_t cases = 0;
  uint64_t counts[ends] = {};
  std::vector<End> all;      ///< of every case
  std::vector<Found> found;  ///< signals, hangs, others and wrong results; the first hundred
};

/// Case `index` of a target, the same in every process.
struct Cases {
  std::function<std::string(uint64_t index)> input;  ///< its bytes or text
  /// The digests that an accepted case may have; empty: any.
  std::function<Digests(Communicator*)> right = {};
};

/// Cases 0, 1, ... until `count` of them or `seconds` are over. `scratch` is a folder in memory.
Tally run_cases(const Target& target, const Cases& cases, uint64_t count, double seconds,
                const std::string& scratch);

}  // namespace gyre::fuzz
