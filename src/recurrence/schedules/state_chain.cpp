// The state of a document is passed from part to part, and so from rank to rank.
//
// Forward:
//
//     start receiving the state before each continued part
//     each part that begins a chain: run it, start sending the state behind it
//     M, B of each part that a document passes through
//     documents that begin and end here
//     each continued part, in the order of places in chains:
//       wait; if the document passes through: S' = M S + B, start sending it
//       the part, from this state
//
// Backward is the same with gradients, from the last part of a chain to the first, with C and Mᵀ.
//
// Example, cp = 4, one document: rank 0 runs its part and sends S_0; rank 1 has M, B by then, and
// sends S_1 = M_1 S_0 + B_1 at once, and so on: the messages are serial, the work is not. A document
// that ends on a rank ends the chain: the next one begins without a message.
//
// Example, cp = 2, one document, dual-chunk-swap: rank 0 sends the state behind part 1 to rank 1,
// which sends that behind part 2 back.

#include "core/error.hpp"
#include "recurrence/schedules/list.hpp"
#include "recurrence/schedules/steps.hpp"

namespace gyre {
namespace {

using namespace state_step;

/// One pass of a part: from the side where states come from to the side where they go.
struct Side {
  int from = -1, to = -1;          ///< ranks; -1: none
  int received = -1, passed = -1;  ///< buffers
  int own = -1;                    ///< buffer of B, or of C
};

class Chain {
 public:
  Chain(const RecurrenceProblem& problem, int rank) : plan_(empty_state_plan(problem, rank)) {
    const auto buffer = [&](bool wanted, StateKind kind) {
      return wanted ? add_buffer(plan_, kind) : -1;
    };
    for (const StatePart& part : plan_.parts) {
      const std::vector<PartOfRank>& chain = problem.parts.chain(part);
      const int before = part.continued() ? chain[part.place - 1].rank : -1;
      const int behind = part.continues() ? chain[part.place + 1].rank : -1;
      GYRE_CHECK(before != rank && behind != rank, "neighbours of document {} are one part",
                 part.document);
      maps_.push_back(buffer(part.passes_through(), StateKind::map));
      const auto side = [&](int from, int to) {
        return Side{from, to, buffer(from >= 0, StateKind::state),
                    buffer(to >= 0, StateKind::state),
                    buffer(part.passes_through(), StateKind::state)};
      };
      states_.push_back(side(before, behind));
      gradients_.push_back(side(behind, before));
    }
    pass(Pass::forward, plan_.forward);
    pass(Pass::backward, plan_.backward);
  }
  StatePlan take() { return std::move(plan_); }

 private:
  void pass(Pass pass, std::vector<StateStep>& steps) const {
    const bool forward = pass == Pass::forward;
    const char* what = forward ? "state" : "gradient of the state";
    const std::vector<Side>& sides = forward ? states_ : gradients_;
    const std::vector<int> order = parts_by_place(plan_, pass);
    for (const int part : order)
      if (const Side& side = sides[part]; side.from >= 0)
        steps.emplace_back(Exchange{receiving(part), what, {}, {{side.from, {side.received}}}});
    const auto send = [&](int part) {
      const Side& side = sides[part];
      steps.emplace_back(Exchange{sending(part), what, {{side.to, {side.passed}}}, {}});
    };
    for (const int part : order)
      if (sides[part].from < 0 && sides[part].to >= 0) {
        run(part, forward, steps);
        send(part);
      }
    for (const int part : order) {
      if (!plan_.parts[part].passes_through()) continue;
      if (forward)
        steps.emplace_back(Summarize{part, maps_[part], sides[part].own, false});
      else
        steps.emplace_back(SummarizeBack{part, sides[part].own});
    }
    run_whole_documents(plan_, steps);
    for (const int part : order) {
      const Side& side = sides[part];
      if (side.from < 0) continue;
      steps.emplace_back(Wait{receiving(part)});
      if (side.to >= 0) {
        steps.emplace_back(Compose{side.passed, side.received, {{maps_[part], side.own}}});
        send(part);
      }
      run(part, forward, steps);
    }
    for (const int part : order)
      if (sides[part].to >= 0) steps.emplace_back(Wait{sending(part)});
  }
  static int receiving(int part) { return 2 * part; }
  static int sending(int part) { return 2 * part + 1; }
  /// Runs a part. The state behind a part, and the gradient before it, are wanted of a part that a
  /// chain begins with: one that a document passes through has sent them already.
  void run(int part, bool forward, std::vector<StateStep>& steps) const {
    const Side &states = states_[part], &gradients = gradients_[part];
    Run run;
    run.part = part;
    run.before = states.received;
    if (forward && states.received < 0) run.behind = states.passed;
    if (!forward) run.d_behind = gradients.received;
    if (!forward && gradients.received < 0) run.d_before = gradients.passed;
    steps.emplace_back(run);
  }

  StatePlan plan_;
  std::vector<int> maps_;                 // [parts]
  std::vector<Side> states_, gradients_;  // [parts]
};

StatePlan plan(const RecurrenceProblem& problem, int rank) {
  return Chain(problem, rank).take();
}

StateForm closed_form(const RecurrenceProblem& problem, int rank, Pass pass) {
  int64_t messages = 0;
  for (const StatePart& part : problem.parts.of_rank[rank])
    messages += (pass == Pass::forward ? part.continues() : part.continued()) ? 1 : 0;
  return {messages, messages * problem.shape.value_heads * problem.shape.state_elements() * 4};
}

}  // namespace

StateSchedule state_chain_schedule() {
  return {.name = "state-chain",
          .summary = "states travel from rank to rank, each as soon as it is known",
          .plan = plan,
          .closed_form = closed_form,
          .maps = maps_of_chains,
          .why_not = state_refusal};
}

}  // namespace gyre
