#include "attention/schedules/registry.hpp"

#include "core/error.hpp"

namespace gyre {

const std::vector<Schedule>& schedules() {
  static const std::vector<Schedule> all = {
      {"ring", "KV blocks travel round the ring; backward turns round, dKV one step behind",
       ring_plan},
      {"ring-forward", "as ring, but backward travels the same way: dKV makes cp hops",
       ring_forward_plan},
      {"all-gather", "KV of all ranks at once; backward gathers again, dKV by reduce-scatter",
       all_gather_plan},
      {"all-gather-strided", "as all-gather, some KV heads at a time, two stages in flight",
       all_gather_strided_plan, all_gather_strided_refusal},
      {"all-to-all", "tokens exchanged for heads: each rank attends all tokens (Ulysses)",
       all_to_all_plan},
      {"all-to-all-ring", "all-to-all inside groups of ranks, a ring across them",
       all_to_all_ring_plan, all_to_all_ring_refusal},
      {"group-cast", "each rank receives only the KV rows that its queries see", group_cast_plan},
      {"halo", "causal windows: one exchange of borders with the neighbours", halo_plan,
       halo_refusal},
      {"canonical", "the same bits for every cp and layout; for checks, not for speed",
       canonical_plan},
  };
  return all;
}

const Schedule& find_schedule(const std::string& name) {
  std::string names;
  for (const Schedule& schedule : schedules()) {
    if (schedule.name == name) return schedule;
    names += (names.empty() ? "" : ", ") + schedule.name;
  }
  throw_usage("no schedule '{}'; there are: {}", name, names);
}

namespace {

void check_refusal(const Schedule& schedule, const AttentionProblem& problem) {
  const std::string reason = schedule.why_not(problem);
  if (!reason.empty()) throw_usage("schedule {}: {}", schedule.name, reason);
}

}  // namespace

RankPlan plan_rank(const Schedule& schedule, const AttentionProblem& problem, int rank) {
  check_refusal(schedule, problem);
  return schedule.plan(problem, rank);
}

Plan plan_all(const Schedule& schedule, const AttentionProblem& problem) {
  check_refusal(schedule, problem);
  Plan plan{schedule.name, {}};
  for (int r = 0; r < problem.cp(); ++r) plan.ranks.push_back(schedule.plan(problem, r));
  return plan;
}

}  // namespace gyre
