// All-gather attention (Llama 3, arXiv 2407.21783, section 3.3.2): every rank gets the keys and
// values of all others at once. builder/gather.hpp describes and builds the steps.

#include "attention/schedules/builder/gather.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

RankPlan plan(const AttentionProblem& problem, int rank) {
  return gather_plan(problem, rank, {{0, problem.heads.kv_heads}});
}

ClosedForm closed_form(const FormContext& c) {
  return gather_form(c, {{0, c.kv_heads()}});
}

}  // namespace

Schedule all_gather_schedule() {
  return {.name = "all-gather",
          .summary = "KV of all ranks at once; backward gathers again, dKV by reduce-scatter",
          .plan = plan,
          .closed_form = closed_form,
          .reads = {&ScheduleOptions::collectives}};
}

}  // namespace gyre
