// All-to-all attention (DeepSpeed Ulysses, arXiv 2309.14509): exchanges tokens for heads, so that
// each rank attends to all tokens with some of the heads.
//
// Forward:
//
//     q, kv:  [own tokens, all heads]  ->  [all tokens, own heads]
//     attend
//     out:    [all tokens, own heads]  ->  [own tokens, all heads]
//
// Backward: d_out goes to the heads; d_q and d_kv come back in one exchange. q, kv, out and the
// statistics are kept from forward. Tokens lie in the order of the packed stream. A KV head that
// several ranks read is sent to each. With more ranks than query heads the last ranks get none and
// only send and receive; see sharding/heads.hpp.

#include <utility>
#include <vector>

#include "attention/schedules/builder/head_exchange.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

RankPlan all_to_all(const AttentionProblem& problem, int rank) {
  PlanBuilder plan(problem, rank);
  std::vector<int> ranks;
  for (int r = 0; r < problem.cp(); ++r) ranks.push_back(r);
  HeadExchange heads(plan, std::move(ranks));
  const ArraySet& set = heads.arrays();
  heads.before_forward();
  plan.clear(set.out);
  plan.clear(set.stats);
  plan.compute(set, set.kv);
  plan.finish(set);
  heads.after_forward();
  plan.begin(Pass::backward);
  heads.before_backward();
  plan.delta(set);
  plan.clear(set.d_q);
  plan.clear(set.d_kv);
  plan.compute(set, set.kv, set.d_kv);
  plan.sink_gradient(set.stats);
  heads.after_backward();
  return plan.take(set.stats);
}

ClosedForm closed_form(const FormContext& c) {
  return head_exchange_form(c, c.problem.cp());
}

}  // namespace

Schedule all_to_all_schedule() {
  return {.name = "all-to-all",
          .summary = "tokens exchanged for heads: each rank attends all tokens (Ulysses)",
          .plan = all_to_all,
          .closed_form = closed_form,
          .reads = {&ScheduleOptions::collectives}};
}

}  // namespace gyre
