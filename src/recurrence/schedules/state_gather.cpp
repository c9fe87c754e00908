// Every rank gathers the maps of all ranks' parts that continue, and composes what is before it.
//
// Forward:
//
//     M, B of the part that continues on the next rank (identity if there is none)
//     start an all-gather of (M, B)
//     documents that are not continued from another rank, from state 0
//     wait
//     state before the first part: B_1, M_2 B_1 + B_2, ... over the ranks before
//     the first part, from this state
//
// Backward gathers C of the parts that are continued from another rank; M is kept from forward:
//
//     start an all-gather of C; documents that end here; wait
//     gradient behind the last part: C_n, M_nᵀ... over the ranks behind, from the last one on
//     the last part, from this gradient
//
// Example, cp = 4, one document: rank 3 gets S = M_2 (M_1 B_0 + B_1) + B_2, where rank 0's M and all
// of rank 3's slot are not read. Gathered maps serve all ranks, so that the all-gather is one of
// equal blocks, whatever the documents; if no document is on several ranks, nothing is sent.

#include <algorithm>

#include "recurrence/schedules/list.hpp"
#include "recurrence/schedules/steps.hpp"

namespace gyre {
namespace {

using namespace state_step;

class Gather {
 public:
  Gather(const RecurrenceProblem& problem, int rank)
      : plan_(empty_state_plan(problem, rank)),
        chain_(chain_of(*problem.layout, rank)),
        last_(static_cast<int>(plan_.parts.size()) - 1) {
    if (!crosses_ranks(*problem.layout)) {
      for (std::vector<StateStep>* steps : {&plan_.forward, &plan_.backward})
        run_whole_documents(plan_, chain_, *steps);
      return;
    }
    for (int r = 0; r < problem.cp(); ++r)
      slots_.push_back({add_buffer(plan_, StateKind::map), add_buffer(plan_, StateKind::state),
                        add_buffer(plan_, StateKind::state)});
    before_ = chain_.before.empty() ? -1 : add_buffer(plan_, StateKind::state);
    d_behind_ = chain_.behind.empty() ? -1 : add_buffer(plan_, StateKind::state);
    forward();
    backward();
  }
  StatePlan take() { return std::move(plan_); }

 private:
  /// Buffers of what one rank sends.
  struct Slot {
    int map, state, d_state;
  };

  void forward() {
    std::vector<StateStep>& steps = plan_.forward;
    const Slot& own = slots_[plan_.rank];
    steps.emplace_back(Summarize{chain_.behind.empty() ? -1 : last_, own.map, own.state,
                                 !chain_.behind.empty() && !chain_.passes_through});
    gather(
        "maps of states",
        [](const Slot& slot) {
          return std::vector{slot.map, slot.state};
        },
        steps);
    run_whole_documents(plan_, chain_, steps);
    if (last_ >= 0 && !chain_.behind.empty() && !chain_.passes_through) run(last_, steps);
    steps.emplace_back(Wait{0});
    if (chain_.before.empty()) return;
    Compose compose{before_, -1, {}};
    for (const int rank : chain_.before)
      compose.terms.push_back({slots_[rank].map, slots_[rank].state});
    steps.emplace_back(compose);
    run(0, steps);
  }
  void backward() {
    std::vector<StateStep>& steps = plan_.backward;
    steps.emplace_back(SummarizeBack{chain_.before.empty() ? -1 : 0, slots_[plan_.rank].d_state});
    gather(
        "gradients of states", [](const Slot& slot) { return std::vector{slot.d_state}; }, steps);
    run_whole_documents(plan_, chain_, steps);
    if (!chain_.before.empty() && !chain_.passes_through) run(0, steps);
    steps.emplace_back(Wait{0});
    if (chain_.behind.empty()) return;
    Compose compose{d_behind_, -1, {}};
    for (auto rank = chain_.behind.rbegin(); rank != chain_.behind.rend(); ++rank)
      compose.terms.push_back({slots_[*rank].map, slots_[*rank].d_state});
    steps.emplace_back(compose);
    run(last_, steps);
  }
  template <class Buffers>
  void gather(const char* what, Buffers buffers_of, std::vector<StateStep>& steps) const {
    Exchange exchange;
    exchange.what = what;
    exchange.all_gather = true;
    exchange.sends = {{plan_.rank, buffers_of(slots_[plan_.rank])}};
    for (size_t r = 0; r < slots_.size(); ++r)
      exchange.recvs.push_back({static_cast<int>(r), buffers_of(slots_[r])});
    steps.emplace_back(exchange);
  }
  /// Runs a part with the states of its ends that this rank has.
  void run(int part, std::vector<StateStep>& steps) const {
    Run run;
    run.part = part;
    run.before = part == 0 ? before_ : -1;
    if (&steps == &plan_.backward && part == last_) run.d_behind = d_behind_;
    steps.emplace_back(run);
  }

  StatePlan plan_;
  StateChain chain_;
  int last_;
  std::vector<Slot> slots_;  // [cp]
  int before_ = -1, d_behind_ = -1;
};

StatePlan plan(const RecurrenceProblem& problem, int rank) {
  return Gather(problem, rank).take();
}

StateForm closed_form(const RecurrenceProblem& problem, int, Pass pass) {
  if (!crosses_ranks(*problem.layout)) return {};
  const RecurrenceShape& shape = problem.shape;
  const int64_t maps = pass == Pass::forward ? shape.map_elements() : 0;
  return {1, (problem.cp() - 1) * shape.value_heads * (maps + shape.state_elements()) * 4};
}

int64_t maps(const RecurrenceProblem& problem) {
  return std::max(0, problem.cp() - 2);
}

}  // namespace

StateSchedule state_gather_schedule() {
  return {.name = "state-gather",
          .summary = "all-gather of the maps of states, composed by every rank",
          .plan = plan,
          .closed_form = closed_form,
          .maps = maps};
}

}  // namespace gyre
