#pragma once
// Simulates the plans of all ranks on a machine model (predict/machine.hpp): how long a pass takes.
//
//     for every rank, in the order of its steps:
//         Exchange   packs and copies slices that need it, then posts. A message waits for the
//                    earlier ones of this rank on links of the same tier, holds the link for
//                    bytes / bandwidth, and arrives one latency later
//         Wait       until all received messages of the exchange have arrived and all sent ones
//                    have left the link; then unpacks or adds slices that need it
//         Compute    the time that the kernel model says, and what a transfer beside it costs
//         Clear, Delta   bytes / copy rate
//
// The k-th message from one rank to another matches the k-th receive that the other has posted for
// it. Messages leave when they are posted, even before the receive is, and receiving does not slow
// a rank down: the network has buffers, and what is lost while all send is LinkTier::all_at_once.
// A library's all-gather or reduce-scatter begins when the last rank of its group has posted it,
// and takes what predict/collective_model.hpp says. All ranks start at time 0.
//
// Example, a ring of n ranks in which every step takes t, with blocks of k bytes: each step but the
// last overlaps with the transfer of the next block, so that the pass takes
//     t + (n - 1) · max(t, latency + k / bandwidth).

#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "predict/machine.hpp"
#include "predict/program.hpp"
#include "runtime/trace.hpp"

namespace gyre {

/// Seconds from the start. Lane, name, kind and step are as in traces of real runs, but that a
/// message lasts from taking the link to arrival, and each has its own span.
struct SimulatedSpan : TraceSpan {
  int peer = -1;     ///< messages: receiver; -1: an operation of the library
  int message = -1;  ///< messages: index into the step's sends
  double left = 0;   ///< messages: when the link is free again
};

/// Where the time of a rank goes, in seconds.
struct RankTimes {
  double compute = 0;  ///< in Compute steps
  double slowed = 0;   ///< of them: what the kernel loses to transfers beside it
  double pass = 0;     ///< in Clear and Delta steps
  double copy = 0;     ///< copies for messages, and sums of received slices
  double wait = 0;
  double total = 0;  ///< when the last step ends: compute, pass, copy and wait
  /// What communication adds: copies, waiting, and a slower kernel.
  double exposed() const { return copy + wait + slowed; }
};
struct RankTimeline : RankTimes {
  std::vector<SimulatedSpan> spans;  ///< of each lane in the order of time
  /// Exchanges as traces of real runs have them: from the posting to the end of the Wait, with all
  /// that is sent and received.
  std::vector<TraceSpan> transfers;
};

/// Time until the last rank has ended.
template <class Ranks>
double makespan_of(const Ranks& ranks) {
  double longest = 0;
  for (const RankTimes& rank : ranks) longest = std::max(longest, rank.total);
  return longest;
}
/// The same without messages: no copies for them, no waits, no slower kernel.
template <class Ranks>
double compute_only_of(const Ranks& ranks) {
  double longest = 0;
  for (const RankTimes& rank : ranks)
    longest = std::max(longest, rank.compute - rank.slowed + rank.pass);
  return longest;
}

struct Simulation {
  Pass pass = Pass::forward;
  std::vector<RankTimeline> ranks;  ///< [cp]
  double makespan() const { return makespan_of(ranks); }
  double compute_only() const { return compute_only_of(ranks); }
  double exposed() const { return makespan() - compute_only(); }
};

/// The timeline of one direction. O(steps + messages) time and memory. Throws a runtime error,
/// which names rank, step and peer, for a wrong plan: ranks wait for each other or for a message
/// that no rank sends, the two ends of a message differ in bytes, a message is never received, or
/// an exchange is never waited for.
Simulation simulate(const Plan& plan, Pass pass, const HeadShape& heads, const ElementTypes& types,
                    const MachineModel& machine, GroupPlace place = {});

/// What a trace of a real run has: spans of the kernel's lane, and the transfers.
std::vector<TraceSpan> trace_of(const RankTimeline& rank, Pass pass);

/// The times of programs, without spans: O(operations) time, O(ranks + messages under way) memory.
/// Throws as simulate() does; `schedule` is named in errors.
std::vector<RankTimes> run_programs(const Programs& programs, const MachineModel& machine,
                                    const std::string& schedule);

}  // namespace gyre
