// Ring attention (Liu et al., arXiv 2310.01889): keys and values travel, queries stay; backward
// reverses direction. builder/ring_steps.hpp describes and builds the steps.

#include "attention/schedules/builder/ring_steps.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

RankPlan plan(const AttentionProblem& problem, int rank) {
  return flat_ring_plan(problem, rank, true);
}

ClosedForm closed_form(const FormContext& c) {
  return flat_ring_form(c, true);
}

}  // namespace

Schedule ring_schedule() {
  return {.name = "ring",
          .summary = "KV blocks travel round the ring; backward in reverse, dKV one step later",
          .plan = plan,
          .closed_form = closed_form,
          .reads = {&ScheduleOptions::merge}};
}

}  // namespace gyre
