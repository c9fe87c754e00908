#pragma once
// Simulates the plans of all ranks on a machine model (predict/machine.hpp): how long a pass takes.
//
//     for every rank, in the order of its steps:
//         Exchange   packs and copies slices that need it, then posts. A message waits for the
//                    earlier ones of this rank on the same link, holds the link for
//                    bytes / bandwidth, and arrives one latency later
//         Wait       until all received messages of the exchange have arrived and all sent ones
//                    have left the link; then unpacks or adds slices that need it
//         Compute    FLOPs / rate
//         Clear, Delta   bytes / copy rate
//
// The k-th message from one rank to another matches the k-th receive that the other has posted for
// it. Messages leave when they are posted, even before the receive is, and receiving does not slow
// a rank down: the network has buffers and full bisection bandwidth. All ranks start at time 0.
//
// Example, a ring of n ranks in which every step takes t, with blocks of k bytes: each step but the
// last overlaps with the transfer of the next block, so that the pass takes
//     t + (n - 1) · max(t, latency + k / bandwidth).

#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "predict/machine.hpp"
#include "runtime/trace.hpp"

namespace gyre {

enum class SpanKind {
  compute,
  pass,     ///< Clear and Delta: one pass over arrays
  copy,     ///< made for messages
  wait,     ///< for messages
  message,  ///< on the communication lane: from taking the link to arrival
};

/// Seconds from the start. Lane and name are as in traces of real runs.
struct SimulatedSpan : TraceSpan {
  SpanKind kind = SpanKind::compute;
  int step = 0;      ///< index into the rank's list of steps
  int peer = -1;     ///< messages: receiver
  int message = -1;  ///< messages: index into the step's sends
  double left = 0;   ///< messages: when the link is free again
};

struct RankTimeline {
  std::vector<SimulatedSpan> spans;  ///< of each lane in the order of time
  double compute = 0;                ///< in Compute steps
  double pass = 0;                   ///< in Clear and Delta steps
  double copy = 0;                   ///< copies for messages, and sums of received slices
  double wait = 0;
  double total = 0;  ///< when the last step ends: the sum of the others
  /// What communication adds: copies and waiting.
  double exposed() const { return copy + wait; }
};

struct Simulation {
  Pass pass = Pass::forward;
  std::vector<RankTimeline> ranks;  ///< [cp]
  /// Time until the last rank has ended.
  double makespan() const;
  /// The same without messages, copies for them and waits.
  double compute_only() const;
  double exposed() const { return makespan() - compute_only(); }
};

/// FLOPs of a Compute step: 4 · head_dim for each visible pair and query head forward (two
/// products); backward 10 (five), or 6 for d_q alone, 8 for d_kv alone.
double step_flops(const RankPlan& plan, const step::Compute& compute, const HeadShape& heads);

/// The timeline of one direction. O(steps + messages) time and memory. Throws a runtime error,
/// which names rank, step and peer, for a wrong plan: ranks wait for each other or for a message
/// that no rank sends, the two ends of a message differ in bytes, a message is never received, or
/// an exchange is never waited for.
Simulation simulate(const Plan& plan, Pass pass, const HeadShape& heads, const ElementTypes& types,
                    const MachineModel& machine);

}  // namespace gyre
