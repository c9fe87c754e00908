// A ring without reversal: backward travels like forward, from the own block on. It needs n-1 hops
// of the block and n of its gradient; the last hop is not hidden.

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
          .summary = "as ring, but backward travels in the same direction: dKV makes cp hops",
          .plan = plan,
          .closed_form = closed_form};
}

}  // namespace gyre
