#pragma once
// A timeline of one rank: named spans on a few lanes.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/clock.hpp"

namespace gyre {

enum class TraceLane { compute, communication };

/// Use of a span's time. Messages are on the communication lane, all other kinds on the compute
/// lane.
enum class SpanKind {
  compute,
  pass,     ///< one pass over arrays: clears, deltas, sinks
  copy,     ///< copying for messages
  wait,     ///< waiting for messages
  message,  ///< from the posting of a transfer to its end
};
constexpr const char* name_of(SpanKind kind) {
  switch (kind) {
    case SpanKind::compute:
      return "compute";
    case SpanKind::pass:
      return "pass";
    case SpanKind::copy:
      return "copy";
    case SpanKind::wait:
      return "wait";
    case SpanKind::message:
      break;
  }
  return "message";
}

/// Peer and bytes of a message in a transfer.
struct TraceMessage {
  int peer = 0;
  int64_t bytes = 0;
};

struct TraceSpan {
  TraceLane lane;
  std::string name;
  double begin = 0, end = 0;  ///< seconds on this rank's monotonic clock
  SpanKind kind = SpanKind::compute;
  int step = -1;                                       ///< index into a list of steps; -1 if none
  std::string direction = {};                          ///< list that `step` indexes: "fwd", "bwd"
  std::vector<TraceMessage> sent = {}, received = {};  ///< for a transfer: one per peer
};

class Trace {
 public:
  static double now() { return monotonic_seconds(); }
  void add(TraceSpan span) { spans_.push_back(std::move(span)); }
  /// Spans in order of add(); for transfers, in order of posting.
  const std::vector<TraceSpan>& spans() const { return spans_; }
  void clear() { spans_.clear(); }

 private:
  std::vector<TraceSpan> spans_;
};

}  // namespace gyre
