// Ring attention whose backward pass goes round in the direction of forward, from each rank's own
// block on: n-1 hops of keys and values, n of their gradients; no compute hides the last hop.

#include "attention/schedules/builder/ring_steps.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

RankPlan plan(const AttentionProblem& problem, int rank) {
  return flat_ring_plan(problem, rank, false);
}

ClosedForm closed_form(const FormContext& c) {
  return flat_ring_form(c, false);
}

}  // namespace

Schedule ring_forward_schedule() {
  return {.name = "ring-forward",
          .summary = "KV blocks travel round the ring in both passes; backward dKV makes cp hops",
          .plan = plan,
          .closed_form = closed_form,
          .reads = {&ScheduleOptions::merge}};
}

}  // namespace gyre
