// All-to-all inside groups of ranks, ring across them (USP, arXiv 2405.07719; TransformerEngine's
// "a2a+p2p"): heads are exchanged over fast links, while slow links carry a ring of fewer, larger
// blocks.
//
// cp = inner · outer; a group is `inner` consecutive ranks. Rank r has position r mod inner in
// group r / inner.
//
//     exchange tokens for heads inside the group
//     ring over the ranks with the same position, one per group: attend the group's queries to
//         the keys of each group, for this rank's heads
//     exchange back
//
// Example, cp = 6, inner = 2: groups 01 23 45; rings 0 2 4 (first half of the heads) and 1 3 5.
// inner = 1 is the ring, inner = cp the all-to-all.

#include <algorithm>
#include <numeric>

#include "attention/schedules/builder/head_exchange.hpp"
#include "attention/schedules/builder/ring_steps.hpp"
#include "attention/schedules/list.hpp"
#include "core/error.hpp"

namespace gyre {
namespace {

std::vector<int> group_ranks(int group, int inner) {
  std::vector<int> ranks(inner);
  std::iota(ranks.begin(), ranks.end(), group * inner);
  return ranks;
}

/// Ranks per inner group: the option, or a default if it is 0.
int64_t inner_ranks(const AttentionProblem& problem) {
  if (problem.options.inner != 0) return problem.options.inner;
  // The largest inner <= sqrt(cp) that divides cp and the KV heads, so that none is replicated.
  const auto most = static_cast<int>(std::gcd<int64_t>(problem.cp(), problem.heads.kv_heads));
  int inner = 1;
  for (int d = 2; d <= most; ++d)
    if (most % d == 0 && int64_t{d} * d <= problem.cp()) inner = d;
  return inner;
}

std::string refusal(const AttentionProblem& problem) {
  const int64_t cp = problem.cp(), inner = inner_ranks(problem);
  if (inner >= 1 && cp % inner == 0) return "";
  if (inner < 1 || inner > cp)
    return fmt::format("an inner group of {} of {} ranks; the nearest valid one is {}", inner, cp,
                       std::clamp<int64_t>(inner, 1, cp));
  int64_t below = inner, above = inner;
  while (cp % below != 0) --below;
  while (cp % above != 0) ++above;
  return fmt::format("inner groups of {} do not divide {} ranks; the nearest that do are {} and {}",
                     inner, cp, below, above);
}

RankPlan all_to_all_ring(const AttentionProblem& problem, int rank) {
  PlanBuilder plan(problem, rank);
  const auto inner = static_cast<int>(inner_ranks(problem));
  HeadExchange heads(plan, group_ranks(rank / inner, inner));
  Ring ring;
  ring.mine = rank / inner;
  ring.set = heads.arrays();
  for (int g = 0; g < problem.cp() / inner; ++g) {
    const std::vector<int> members = group_ranks(g, inner);
    ring.ranks.push_back(members[rank % inner]);
    ring.blocks.push_back(plan.rows_in_order(members, ArrayKind::kv));
  }
  ring.storages = {plan.new_storage(), plan.new_storage()};
  heads.before_forward();
  const int last_block = ring_forward(plan, ring);
  heads.after_forward();
  plan.begin(Pass::backward);
  heads.before_backward();
  ring_backward(plan, ring, last_block);
  heads.after_backward();
  return plan.take(ring.set.stats);
}

ClosedForm closed_form(const FormContext& c) {
  return head_exchange_form(c, static_cast<int>(inner_ranks(c.problem)));
}

}  // namespace

Schedule all_to_all_ring_schedule() {
  return {.name = "all-to-all-ring",
          .summary = "all-to-all inside groups of ranks, a ring across them",
          .plan = all_to_all_ring,
          .closed_form = closed_form,
          .refusal = refusal,
          .reads = {&ScheduleOptions::inner, &ScheduleOptions::collectives}};
}

}  // namespace gyre
