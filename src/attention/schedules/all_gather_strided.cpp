// All-gather attention in stages of a few KV heads each. It needs memory for two stages instead of
// all heads, and cp-1 messages per stage instead of cp-1 in all. builder/gather.hpp describes and
// builds the steps.

#include <algorithm>
#include <vector>

#include "attention/schedules/builder/gather.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

std::vector<HeadRange> stages_of(const AttentionProblem& problem) {
  const int64_t kv_heads = problem.heads.kv_heads, at_once = problem.options.heads_at_once;
  std::vector<HeadRange> stages;
  for (int64_t h = 0; h < kv_heads; h += at_once)
    stages.push_back({h, std::min(at_once, kv_heads - h)});
  return stages;
}

RankPlan plan(const AttentionProblem& problem, int rank) {
  return gather_plan(problem, rank, stages_of(problem));
}

std::string refusal(const AttentionProblem& problem) {
  const int64_t at_once = problem.options.heads_at_once, heads = problem.heads.kv_heads;
  if (at_once >= 1 && at_once <= heads) return "";
  return fmt::format("{} KV heads at once of {}; the nearest valid number is {}", at_once, heads,
                     std::clamp<int64_t>(at_once, 1, heads));
}

ClosedForm closed_form(const FormContext& c) {
  return gather_form(c, stages_of(c.problem));
}

}  // namespace

Schedule all_gather_strided_schedule() {
  return {.name = "all-gather-strided",
          .summary = "KV of all ranks for some heads at a time, two stages in flight",
          .plan = plan,
          .closed_form = closed_form,
          .refusal = refusal,
          .reads = {&ScheduleOptions::heads_at_once, &ScheduleOptions::collectives}};
}

}  // namespace gyre
