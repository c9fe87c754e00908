#pragma once
// The timelines of all ranks in one file, for Perfetto (ui.perfetto.dev) or chrome://tracing.
//
//     ClockOffset clock = common_clock(world);     // before or after the traced part
//     ... trace.add({TraceLane::compute, "keys of rank 2", begin, end}) ...
//     text = trace_text(trace, world, clock);
//
// The format is Chrome's trace events: a process is a rank, a thread is a lane. Overlapping spans
// of a lane go to further lanes, so that all of them are visible. An arrow goes from each message's
// sender, where it is posted, to its receiver, where it is found to be complete:
//
//     rank 2 on node1   compute           |keys of rank 2   ||keys of rank 1 |
//                       communication     |KV ------------|
//                                          \___________
//     rank 3 on node1   compute           |keys of rank 3 \||keys of rank 2 |
//                       communication     |KV ------------|
//                       communication 2          |dKV ---------|
//
// The file holds otherData.clocks, the alignment of the ranks' clocks, and these events:
//   X        a span (cat: name_of its kind; args: pass, step; of a transfer also bytes_sent,
//            bytes_received and the lists `to` and `from` of {peer, bytes})
//   s, f     both ends of a message (args: the other rank, bytes, step)
//   M        names and order of processes and threads

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

/// Compares clocks with rank 0 by Cristian's algorithm (Distributed Computing 3, 1989). Each rank
/// in turn asks rank 0 for its time, `rounds` times (>= 1), and uses the shortest round trip. Rank
/// 0 is assumed to read its clock halfway, so the error is at most half that trip. Collective.
ClockOffset align_clocks(Communicator& world, int rounds = 20, const TraceClock& now = &Trace::now);

/// Identifies the clock of Trace::now(). Processes with equal numbers read the same clock. Linux
/// has one clock per boot and time namespace. Returns 0 if the clock is unknown.
int64_t monotonic_clock_id();

/// The offset of Trace::now(). Ranks that read the same clock (`clock_id`) use the best of their
/// comparisons. Nothing is compared if all ranks read rank 0's clock. Collective.
ClockOffset common_clock(Communicator& world, int64_t clock_id = monotonic_clock_id());

/// The spans of one rank.
struct RankTrace {
  std::string host;
  ClockOffset clock;
  std::vector<TraceSpan> spans;
};

/// The text of the file. `ranks` are in rank order; time 0 is the earliest begin of all spans. The
/// k-th message from one rank to another is the k-th that the other receives from it. Clocks are
/// moved forward if a message would otherwise be received before it is sent.
std::string trace_json(std::vector<RankTrace> ranks);

/// The text of the file, on rank 0, from the spans of all ranks. Collective.
std::string trace_text(const Trace& mine, Communicator& world, const ClockOffset& clock);

}  // namespace gyre
