#pragma once
// Simulates the plans of all ranks on a machine model (predict/machine.hpp) and times a pass.
//
//     for every rank, in the order of its steps:
//         Exchange   packs and copies slices that need it, then posts. A message waits for the
//                    earlier ones of this rank on links of the same tier, holds the link for
//                    bytes / bandwidth, and arrives one latency later
//         Wait       until all received messages of the exchange have arrived and all sent ones
//                    have left the link; then unpacks or adds slices that need it
//         Compute    the kernel model's time, plus the slowdown by concurrent transfers
//         Clear, Delta   bytes / copy rate
//
// The k-th message from one rank to another matches the k-th receive that the other has posted for
// it. Messages leave when they are posted, even before the receive is: the network buffers them.
// Receiving does not slow a rank down; LinkTier::all_at_once accounts for what is lost while all
// send. A library's all-gather or reduce-scatter begins when the last rank of its group has posted
// it, and its duration is that of predict/collective_model.hpp. All ranks start at time 0.
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

/// Times are seconds from the start. Lane, name, kind and step are as in traces of real runs,
/// except that each message has its own span, from taking the link to its arrival.
struct SimulatedSpan : TraceSpan {
  int peer = -1;     ///< messages: receiver; -1: a library collective
  int message = -1;  ///< messages: index into the step's sends
  double left = 0;   ///< messages: when the last byte has left the link
};

/// Time of a rank by cause, in seconds.
struct RankTimes {
  double compute = 0;  ///< in Compute steps
  double slowed = 0;   ///< part of compute: kernel time lost to concurrent transfers
  double pass = 0;     ///< in Clear and Delta steps
  double copy = 0;     ///< copies for messages, and sums of received slices
  double wait = 0;
  double total = 0;  ///< end of the last step: compute + pass + copy + wait
  /// Time that communication adds: copies, waits, and a slower kernel.
  double exposed() const { return copy + wait + slowed; }
};
struct RankTimeline : RankTimes {
  std::vector<SimulatedSpan> spans;  ///< ascending in time within each lane
  /// Exchanges as in traces of real runs: from the posting to the end of the Wait, with everything
  /// that is sent and received.
  std::vector<TraceSpan> transfers;
};

/// Time until the last rank ends.
template <class Ranks>
double makespan_of(const Ranks& ranks) {
  double longest = 0;
  for (const RankTimes& rank : ranks) longest = std::max(longest, rank.total);
  return longest;
}
/// As makespan_of, but without messages: no copies for them, no waits, no slower kernel.
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

/// Simulates one direction. O(steps + messages) time and memory. Throws a runtime error that names
/// rank, step and peer if the plan is wrong: ranks wait for each other or for a message that no
/// rank sends, the two ends of a message differ in bytes, a message is never received, or an
/// exchange is never waited for.
Simulation simulate(const Plan& plan, Pass pass, const HeadShape& heads, const ElementTypes& types,
                    const MachineModel& machine, GroupPlace place = {});

/// Trace in the form of a real run: spans of the kernel's lane, and the transfers.
std::vector<TraceSpan> trace_of(const RankTimeline& rank, Pass pass);

/// Times of programs, without spans: O(operations) time, O(ranks + messages in flight) memory.
/// Throws as simulate() does; `schedule` appears in errors.
std::vector<RankTimes> run_programs(const Programs& programs, const MachineModel& machine,
                                    const std::string& schedule);

}  // namespace gyre
