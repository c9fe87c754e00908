#pragma once
// Times alternatives on a device, in alternation.
//
//     for each repetition, for each alternative:   mark, run, mark
//
// All alternatives thus meet the same clocks, temperature and neighbours; every other repetition
// runs in reverse order. The result of each is its median. A ratio is that of two medians of one
// run, never of two runs.

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/stream.hpp"

namespace gyre::bench {

/// One way of doing the work that is compared.
struct Alternative {
  std::string name;
  std::function<void()> run;  ///< submits to the stream
  double bytes = 0;           ///< bytes that it must move; 0: not limited by memory
  double flops = 0;           ///< FLOPs that it computes; 0: not limited by them
  /// Replaces run for work that waits for its own end: returns its seconds between such marks.
  std::function<double()> timed = {};
};

struct Options {
  int repetitions = 11;
  int warmup = 3;
};

class Suite {
 public:
  Suite(Stream& stream, Options options) : stream_(stream), options_(options) {}

  /// Measures alternatives of `group` on `shape` in alternation. The first is the baseline; `ratio`
  /// of each other is its rate (bytes, or else FLOPs, or else runs, per second) over the
  /// baseline's.
  void measure(const std::string& group, const nlohmann::json& shape,
               const std::vector<Alternative>& alternatives);

  /// One entry per alternative: group, shape, name, seconds (all, in order), median_s, bytes_per_s
  /// or flops_per_s, and, except for the first of a group, baseline and ratio.
  const nlohmann::json& results() const { return results_; }

 private:
  Stream& stream_;
  Options options_;
  nlohmann::json results_ = nlohmann::json::array();
};

/// Clocks and driver version of a device as reported by nvidia-smi; null without it.
nlohmann::json device_state(int device);

}  // namespace gyre::bench
