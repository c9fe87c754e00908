#include "recurrence/schedules/steps.hpp"

namespace gyre {

StatePlan empty_state_plan(const RecurrenceProblem& problem, int rank) {
  StatePlan plan;
  plan.rank = rank;
  for (const Fragment& f : problem.layout->shard(rank).fragments) plan.parts.push_back(f.length);
  return plan;
}

int add_buffer(StatePlan& plan, StateKind kind) {
  plan.buffers.push_back(kind);
  return static_cast<int>(plan.buffers.size()) - 1;
}

void run_whole_documents(const StatePlan& plan, const StateChain& chain,
                         std::vector<StateStep>& steps) {
  const auto parts = static_cast<int>(plan.parts.size());
  for (int part = chain.before.empty() ? 0 : 1; part < parts - (chain.behind.empty() ? 0 : 1);
       ++part) {
    state_step::Run run;
    run.part = part;
    steps.emplace_back(run);
  }
}

}  // namespace gyre
