#pragma once
// How long the plans of all ranks would take on a machine that is described by a few numbers.
//
//     for every rank, in the order of its steps:
//         Exchange   packs and copies what needs it, then posts. A message waits for the earlier
//                    ones of this rank on the same link, holds the link for bytes / bandwidth, and
//                    arrives a latency later
//         Wait       until every message of the exchange has arrived and every one sent has left
//                    the link; then unpacks, or adds, what needs it
//         Compute    FLOPs / rate
//         Clear, Delta   bytes / copy rate
//
// The k-th message from one rank to another meets the k-th that the other expects of it. Messages
// leave when they are posted, whether or not they are expected yet, and what a rank receives does
// not slow it down: that is a network with buffers and full bisection bandwidth. Ranks start
// together.
//
// Example, a ring of n ranks in which every step takes t, with blocks of k bytes: the transfer of
// each step but the last is hidden by it if it can be, so that the pass takes
//     t + (n - 1) · max(t, latency + k / bandwidth).

#include <limits>
#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "runtime/trace.hpp"

namespace gyre {

/// A machine of equal ranks. Rates may be infinite: then what they limit takes no time.
struct MachineModel {
  double flops_per_s = std::numeric_limits<double>::infinity();  ///< one rank's kernel
  double latency_s = 0;                                          ///< of a message
  double bytes_per_s = std::numeric_limits<double>::infinity();  ///< out of one rank
  int ranks_per_node = 0;     ///< 0: all links are alike; otherwise consecutive ranks share a node
  double node_latency_s = 0;  ///< the same inside a node, on a link of its own
  double node_bytes_per_s = std::numeric_limits<double>::infinity();
  double copy_bytes_per_s = std::numeric_limits<double>::infinity();  ///< packing, adding, clearing
};

/// Throws a usage error that names the first number of the model that is not one: rates are
/// positive, latencies and ranks_per_node at least 0.
void check_machine(const MachineModel& machine);

enum class SpanKind {
  compute,
  pass,     ///< Clear and Delta: one pass over arrays
  copy,     ///< made for messages
  wait,     ///< nothing else to do
  message,  ///< on the communication lane: from holding the link to arriving
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
  double copy = 0;                   ///< copies made for messages, and sums of what came
  double wait = 0;
  double total = 0;  ///< when the last step ends: the sum of the others
  /// What communication adds: copies and waiting.
  double exposed() const { return copy + wait; }
};

struct Simulation {
  Pass pass = Pass::forward;
  std::vector<RankTimeline> ranks;  ///< [cp]
  /// Until the last rank has ended.
  double makespan() const;
  /// The same if messages and copies for them took no time and nobody waited.
  double compute_only() const;
  double exposed() const { return makespan() - compute_only(); }
};

/// FLOPs of a Compute step: 4 · head_dim for each visible pair and query head forward (two
/// products); backward 10 (five), or 6 for d_q alone, 8 for d_kv alone.
double step_flops(const RankPlan& plan, const step::Compute& compute, const HeadShape& heads);

/// The timeline of one direction. O(steps + messages) time and memory. Throws a runtime error when
/// ranks wait for each other or for a message that nobody sends, when the two ends of a message
/// differ in bytes, when a message is never received and when an exchange is never waited for: such
/// a plan is wrong. It names rank, step and peer.
Simulation simulate(const Plan& plan, Pass pass, const HeadShape& heads, const ElementTypes& types,
                    const MachineModel& machine);

}  // namespace gyre
