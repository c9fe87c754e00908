#pragma once
// Explains plans in words and numbers: what each rank does, step by step, and what it costs.
//
//     forward, rank 1 of 3: 2048 slots, 2048 tokens
//       step  0  Clear        own out
//       step  1  Clear        own stats
//       step  2  Exchange #0  KV: own kv -> rank 2 (2048 tokens, 1.05 MB)
//                             A (kv of rank 0) <- rank 0 (2048 tokens, 1.05 MB)
//       step  3  Compute      own kv: 3 rectangles (1 full, 2 causal), 2.1 M pairs, 66.7 % of their
//                             area, for 8 heads
//       step  4  Wait #0      KV

#include <string>

#include "attention/plan.hpp"
#include "predict/simulate.hpp"

namespace gyre {

/// For each simulated direction a table over ranks with pairs, messages, bytes, memory and the
/// simulated times; then the steps of every rank. With more than 8 ranks, the table shows 8 evenly
/// spaced ones, and steps are left out; if `verbose`, the table shows 64, and the steps are those
/// of rank 0.
std::string explain(const Plan& plan, const AttentionProblem& problem, const ElementTypes& types,
                    const std::vector<Simulation>& directions, bool verbose = false);

/// "ring, dual-chunk-swap, cp = 4, 8192 tokens, causal" or "..., causal window of 1024".
std::string plan_title(const Plan& plan, const AttentionProblem& problem);

/// Ranks to show when `most` of `ranks` fit: all, or evenly spaced ones from the first to the last.
std::vector<int> shown_ranks(int ranks, int most);

}  // namespace gyre
