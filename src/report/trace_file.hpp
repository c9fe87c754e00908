#pragma once
// The timelines of all ranks in one file, for Perfetto (ui.perfetto.dev) or chrome://tracing.
//
//     ClockOffset clock = align_clocks(world);     // before or after the traced part
//     ... trace.add(TraceLane::compute, "own kv", begin, end) ...
//     text = trace_text(trace, world, clock);
//
// The format is Chrome's trace events: a process is a rank, a thread is a lane. Overlapping spans
// of a lane go to further lanes, so that all of them are visible:
//
//     rank 3 on node1   compute           |own kv ||kv of rank 2 |
//                       communication     |KV 0    |
//                       communication 2       |KV 1       |

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "runtime/trace.hpp"

namespace gyre {

/// Added to a time of this rank's clock, it gives the time of rank 0's clock.
struct ClockOffset {
  double seconds = 0;
  double uncertainty_s = 0;  ///< the true offset is within `seconds` ± this
};

/// Reads a monotonic clock, in seconds.
using TraceClock = std::function<double()>;

/// Compares clocks with rank 0 by Cristian's algorithm (Distributed Computing 3, 1989). A rank asks
/// for rank 0's time, `rounds` times. The shortest round trip counts; rank 0 is assumed to have
/// read its clock halfway, so the error is at most half the round trip. Collective; ranks take
/// turns. `rounds` >= 1.
ClockOffset align_clocks(Communicator& world, int rounds = 20, const TraceClock& now = &Trace::now);

/// The spans of one rank.
struct RankTrace {
  std::string host;
  ClockOffset clock;
  std::vector<TraceSpan> spans;
};

/// The text of the file. `ranks` are in rank order; time 0 is the earliest begin of all spans.
std::string trace_json(const std::vector<RankTrace>& ranks);

/// The text of the file, on rank 0, from the spans of all ranks. Collective.
std::string trace_text(const Trace& mine, Communicator& world, const ClockOffset& clock);

}  // namespace gyre
