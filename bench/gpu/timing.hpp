#pragma once
// Times of work on a device: alternatives of one thing, measured in turns.
//
//     for each repetition, for each alternative:   mark, run, mark
//
// so that all meet the same clocks, the same temperature and the same neighbours; every other
// repetition goes through them backwards. Of each the median counts; a ratio is that of two medians
// of one run, never of two runs.

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/stream.hpp"

namespace gyre::bench {

/// One way of doing something.
struct Alternative {
  std::string name;
  std::function<void()> run;  ///< submits to the stream
  double bytes = 0;           ///< that it must read and write; 0: not limited by memory
  double flops = 0;           ///< of what it computes; 0: not limited by these
  /// In the place of run, for work that waits for its own end: its seconds between such marks.
  std::function<double()> timed = {};
};

struct Options {
  int repetitions = 11;
  int warmup = 3;
};

class Suite {
 public:
  Suite(Stream& stream, Options options) : stream_(stream), options_(options) {}

  /// Measures alternatives of `group` on `shape` in turns. The first is what the others are
  /// compared with: their `ratio` is the share of its rate (bytes, or else FLOPs, or else runs, in
  /// a second) that they reach.
  void measure(const std::string& group, const nlohmann::json& shape,
               const std::vector<Alternative>& alternatives);

  /// One entry for each alternative measured: group, shape, name, seconds (all, in order),
  /// median_s, bytes_per_s or flops_per_s, and of all but the first of a group baseline and ratio.
  const nlohmann::json& results() const { return results_; }

 private:
  Stream& stream_;
  Options options_;
  nlohmann::json results_ = nlohmann::json::array();
};

/// "nvidia-smi"'s clocks and driver version of a device; null where it is not there.
nlohmann::json device_state(int device);

}  // namespace gyre::bench
