// The state of a document is passed from rank to rank.
//
// Forward:
//
//     start receiving the state before the first part
//     a last part that begins here: run it, start sending the state behind it
//     a part that is the whole rank: M, B
//     documents that begin and end here
//     wait; for the whole rank: S' = M S + B, start sending it
//     the first part, from this state
//
// Backward is the same with gradients, from the next rank to the one before, with C and Mᵀ.
//
// Example, cp = 4, one document: rank 0 runs its part and sends S_0; rank 1 has M, B by then, and
// sends S_1 = M_1 S_0 + B_1 at once, and so on: the messages are serial, the work is not. A document
// that ends on a rank ends the chain: the next one begins without a message.

#include <algorithm>

#include "recurrence/schedules/list.hpp"
#include "recurrence/schedules/steps.hpp"

namespace gyre {
namespace {

using namespace state_step;

/// One pass of a rank: from the side where states come from to the side where they go.
struct Side {
  int from = -1, to = -1;          ///< neighbours; -1: none
  int received = -1, passed = -1;  ///< buffers
  int own = -1;                    ///< buffer of B, or of C
  int first = -1, last = -1;       ///< parts at these ends
};

class Chain {
 public:
  Chain(const RecurrenceProblem& problem, int rank)
      : plan_(empty_state_plan(problem, rank)), chain_(chain_of(*problem.layout, rank)) {
    const int last = static_cast<int>(plan_.parts.size()) - 1;
    const bool continued = !chain_.before.empty(), continues = !chain_.behind.empty();
    const auto buffer = [&](bool wanted, StateKind kind) {
      return wanted ? add_buffer(plan_, kind) : -1;
    };
    map_ = buffer(chain_.passes_through, StateKind::map);
    const int before = continued ? chain_.before.back() : -1;
    const int behind = continues ? chain_.behind.front() : -1;
    const auto side = [&](int from, int to, int first, int end) {
      return Side{from,
                  to,
                  buffer(from >= 0, StateKind::state),
                  buffer(to >= 0, StateKind::state),
                  buffer(chain_.passes_through, StateKind::state),
                  first,
                  end};
    };
    states_ = side(before, behind, 0, last);
    gradients_ = side(behind, before, last, 0);
    pass(Pass::forward, states_, plan_.forward);
    pass(Pass::backward, gradients_, plan_.backward);
  }
  StatePlan take() { return std::move(plan_); }

 private:
  void pass(Pass pass, const Side& side, std::vector<StateStep>& steps) const {
    const bool forward = pass == Pass::forward;
    const char* what = forward ? "state" : "gradient of the state";
    if (side.from >= 0)
      steps.emplace_back(Exchange{0, what, {}, {{side.from, {side.received}}}, false});
    if (chain_.passes_through) {
      if (forward)
        steps.emplace_back(Summarize{0, map_, side.own, false});
      else
        steps.emplace_back(SummarizeBack{0, side.own});
    } else if (side.to >= 0) {
      run(side.last, forward, steps);
      send(side, what, steps);
    }
    run_whole_documents(plan_, chain_, steps);
    if (side.from >= 0) {
      steps.emplace_back(Wait{0});
      if (chain_.passes_through) {
        steps.emplace_back(Compose{side.passed, side.received, {{map_, side.own}}});
        send(side, what, steps);
      }
      run(side.first, forward, steps);
    }
    if (side.to >= 0) steps.emplace_back(Wait{1});
  }
  static void send(const Side& side, const char* what, std::vector<StateStep>& steps) {
    steps.emplace_back(Exchange{1, what, {{side.to, {side.passed}}}, {}, false});
  }
  /// Runs the first or last part. States behind a part, and gradients before it, are wanted of a
  /// part that the chain begins with: one that passes through has sent them already.
  void run(int part, bool forward, std::vector<StateStep>& steps) const {
    const int last = static_cast<int>(plan_.parts.size()) - 1;
    Run run;
    run.part = part;
    if (part == 0) run.before = states_.received;
    if (forward && part == last && !chain_.passes_through) run.behind = states_.passed;
    if (!forward && part == last) run.d_behind = gradients_.received;
    if (!forward && part == 0 && !chain_.passes_through) run.d_before = gradients_.passed;
    steps.emplace_back(run);
  }

  StatePlan plan_;
  StateChain chain_;
  int map_ = -1;
  Side states_, gradients_;
};

StatePlan plan(const RecurrenceProblem& problem, int rank) {
  return Chain(problem, rank).take();
}

StateForm closed_form(const RecurrenceProblem& problem, int rank, Pass pass) {
  const StateChain chain = chain_of(*problem.layout, rank);
  const bool sends = pass == Pass::forward ? !chain.behind.empty() : !chain.before.empty();
  if (!sends) return {};
  return {1, problem.shape.value_heads * problem.shape.state_elements() * 4};
}

int64_t maps(const RecurrenceProblem& problem) {
  return std::max(0, problem.cp() - 2);
}

}  // namespace

StateSchedule state_chain_schedule() {
  return {.name = "state-chain",
          .summary = "states travel from rank to rank, each as soon as it is known",
          .plan = plan,
          .closed_form = closed_form,
          .maps = maps};
}

}  // namespace gyre
