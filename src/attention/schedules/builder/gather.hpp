#pragma once
// All-gather attention (Llama 3, arXiv 2407.21783, section 3.3.2): every rank gets the keys and
// values of all others and attends its own queries to them.
//
// Works in stages of some KV heads each. Forward, shown for one stage of all heads:
//
//     start sending own KV to all others, receiving theirs
//     attend own queries to own keys
//     wait
//     attend own queries to the keys of all others
//
// Received blocks stay in rank order: rectangles point at each owner's rows.
//
// Backward gathers again (nothing is kept from forward) and returns the gradients by a ring
// reduce-scatter. At hop s rank r sends its sum for the rows of rank r-1-s to r+1, and adds what
// r-1 sends to its own terms for rank r-2-s; the last hop adds to its own rows. The terms for one
// rank's rows are computed while the sum for another rank's is in transit:
//
//     start the gather; gradient of own keys, into d_kv; wait
//     for s in 0 .. cp-2:
//         gradient of the keys of rank r-1-s
//         if s > 0: wait for hop s-1
//         start hop s
//     wait for hop cp-2
//
// The library's all-gather and reduce-scatter (option collectives) move the same bytes in one
// collective each, on arrays of all ranks' rows. All gradients of the others' keys are computed
// before the reduce-scatter starts:
//
//     start the gather; gradient of own keys, into d_kv; wait
//     gradient of the keys of all others; start the reduce-scatter; wait
//
// Example of messages, cp = 3, rank 0: computes and sends the sum for rank 2 (hop 0); computes its
// terms for rank 1, adds the sum from rank 2 and sends the result (hop 1); adds to its own rows the
// sum that rank 2 sends then, which has the terms of ranks 1 and 2.

#include <vector>

#include "attention/schedules/schedule.hpp"

namespace gyre {

/// The plan that gathers the KV heads of each of `stages` in turn. The gather of stage g+1 overlaps
/// with the attention of stage g, and the last hop of stage g with stage g+1.
RankPlan gather_plan(const AttentionProblem& problem, int rank, std::vector<HeadRange> stages);

/// Closed form of gather_plan. Messages per stage: cp - 1, and backward cp - 1 hops of the
/// reduce-scatter; or one library collective for each of the two.
ClosedForm gather_form(const FormContext& c, const std::vector<HeadRange>& stages);

}  // namespace gyre
