#include "apps/shard/heads_for_tokens.hpp"

#include <numeric>

#include "attention/schedules/builder/head_exchange.hpp"

namespace gyre {
namespace {

/// The exchanges on one rank. `exchanged` gets the indices of the exchanged arrays by kind.
RankPlan exchanges_of(const AttentionProblem& problem, int rank, std::vector<int>& exchanged) {
  PlanBuilder plan(problem, rank);
  std::vector<int> ranks(problem.cp());
  std::iota(ranks.begin(), ranks.end(), 0);
  HeadExchange heads(plan, std::move(ranks));
  const ArraySet& set = heads.arrays();
  exchanged = {set.q, set.kv, set.out, set.stats, set.d_out, set.d_q, set.d_kv};
  heads.before_forward();
  plan.begin(Pass::backward);
  heads.after_forward();
  heads.after_backward();
  return plan.take(set.stats);
}

}  // namespace

HeadsForTokens::HeadsForTokens(Communicator& group, const Layout& layout, const HeadShape& shape)
    : problem_{&layout, shape, {}, {}},
      plan_(exchanges_of(problem_, group.rank(), exchanged_)),
      kernel_(make_cpu_kernel()),
      executor_(plan_, problem_.heads, {}, group, *kernel_, stream_, workspace_, true) {}

MatrixView<float> HeadsForTokens::heads(ArrayKind kind) {
  return executor_.matrix_of(index_of(kind)).as<float>();
}

}  // namespace gyre
