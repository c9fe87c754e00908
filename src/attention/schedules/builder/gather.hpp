#pragma once
// All-gather attention (Llama 3, arXiv 2407.21783, section 3.3.2): every rank gets the keys and
// values of all others and attends its own queries to them.
//
// In stages of some KV heads each, one stage of all heads here; forward:
//
//     start sending own KV to all others, receiving theirs
//     attend own queries to own keys
//     wait
//     attend own queries to the keys of all others
//
// What is received lies in rank order and stays there: rectangles point at each owner's rows.
//
// Backward gathers again (nothing is kept from forward), and brings the gradients home by a
// reduce-scatter round the ring. At hop s a rank sends, to r+1, its sum for the rows of rank
// r-1-s, and adds what comes from r-1 to its own terms for rank r-2-s; the last hop adds to its own
// rows. The terms of one rank's rows are computed while the sum for another's is under way:
//
//     start the gather; gradient of own keys, into d_kv; wait
//     for s in 0 .. cp-2:
//         gradient of the keys of rank r-1-s
//         if s > 0: wait for hop s-1
//         start hop s
//     wait for hop cp-2
//
// The library's all-gather and reduce-scatter (option collectives) move the same bytes in one
// operation each, of arrays of all ranks' rows; the gradients of all others' keys are there before
// the reduce-scatter starts:
//
//     start the gather; gradient of own keys, into d_kv; wait
//     gradient of the keys of all others; start the reduce-scatter; wait
//
// Example of messages, cp = 3, rank 0: computes and sends the sum for rank 2 (hop 0); computes that
// for rank 1, adds what comes from rank 2, sends it on (hop 1), and adds to its own rows what rank
// 2 sends then: the terms of ranks 1 and 2.

#include <vector>

#include "attention/schedules/schedule.hpp"

namespace gyre {

/// The plan that gathers the KV heads of each of `stages` in turn. The gather of stage g+1 is under
/// way during the attention of stage g, and the last hop of stage g during stage g+1.
RankPlan gather_plan(const AttentionProblem& problem, int rank, std::vector<HeadRange> stages);

/// Of each stage cp - 1 messages, and cp - 1 hops of the reduce-scatter backward; or one operation
/// of the library each.
ClosedForm gather_form(const FormContext& c, const std::vector<HeadRange>& stages);

}  // namespace gyre
