#pragma once
// A timeline of one rank: named spans on a few lanes.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/clock.hpp"

namespace gyre {

enum class TraceLane { compute, communication };

struct TraceSpan {
  TraceLane lane;
  std::string name;
  double begin = 0, end = 0;  ///< seconds on this rank's monotonic clock
};

class Trace {
 public:
  static double now() { return monotonic_seconds(); }
  void add(TraceLane lane, std::string name, double begin, double end) {
    spans_.push_back({lane, std::move(name), begin, end});
  }
  const std::vector<TraceSpan>& spans() const { return spans_; }
  void clear() { spans_.clear(); }

 private:
  std::vector<TraceSpan> spans_;
};

}  // namespace gyre
