#pragma once
// A timeline of one rank: named spans on a few lanes.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace gyre {

enum class TraceLane { compute, communication };

struct TraceSpan {
  TraceLane lane;
  std::string name;
  double begin = 0, end = 0;  ///< seconds on this rank's monotonic clock
};

class Trace {
 public:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void add(TraceLane lane, std::string name, double begin, double end) {
    spans_.push_back({lane, std::move(name), begin, end});
  }
  const std::vector<TraceSpan>& spans() const { return spans_; }
  void clear() { spans_.clear(); }

 private:
  std::vector<TraceSpan> spans_;
};

}  // namespace gyre
