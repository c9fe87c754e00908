// Every rank gathers the maps of all ranks' parts that continue, and composes what is before its own.
//
// Forward:
//
//     M, B of each part that continues elsewhere; identities up to the most of a rank
//     start an all-gather of them
//     parts that are not continued from elsewhere, from state 0
//     wait
//     each continued part, in the order of its document:
//       the state before it: B_1, M_2 B_1 + B_2, ... over the parts before it in its chain, or on
//       from the state before the rank's previous part of this document
//       the part, from this state
//
// Backward gathers C of the parts that are continued from elsewhere; M is kept from forward:
//
//     start an all-gather of C; parts that end here; wait
//     each part that continues, the last first:
//       the gradient behind it: C_n, M_nᵀ... over the parts behind it, from the last one on
//       the part, from this gradient
//
// Example, cp = 4, one document, contiguous: rank 3 gets S = M_2 (M_1 B_0 + B_1) + B_2; it does not
// read rank 0's M and the identity that it sends itself. Gathered maps serve all ranks, so that the
// all-gather is one of equal blocks, whatever the documents; if no document is on several ranks,
// nothing is sent.
//
// Example, cp = 2, one document, dual-chunk-swap: rank 0 has the parts 1 and 3 of a chain, rank 1 has
// part 2. Rank 0 gets S = M_2 B_1 + B_2 before part 3.

#include <algorithm>
#include <map>

#include "recurrence/schedules/list.hpp"
#include "recurrence/schedules/steps.hpp"

namespace gyre {
namespace {

using namespace state_step;

/// Returns the largest number, over all ranks, of parts for which wanted(part) is true.
template <class Wanted>
int64_t most_parts(const StateParts& parts, Wanted wanted) {
  int64_t most = 0;
  for (const auto& of_rank : parts.of_rank)
    most = std::max<int64_t>(most, std::ranges::count_if(of_rank, wanted));
  return most;
}
int64_t most_maps(const StateParts& parts) {
  return most_parts(parts, [](const StatePart& part) { return part.continues(); });
}
int64_t most_gradients(const StateParts& parts) {
  return most_parts(parts, [](const StatePart& part) { return part.continued(); });
}

class Gather {
 public:
  Gather(const RecurrenceProblem& problem, int rank)
      : plan_(empty_state_plan(problem, rank)), parts_(problem.parts) {
    if (!parts_.crosses()) {
      for (std::vector<StateStep>* steps : {&plan_.forward, &plan_.backward})
        run_whole_documents(plan_, *steps);
      return;
    }
    for (const auto& of_rank : parts_.of_rank) add_slots(of_rank);
    for (const StatePart& part : plan_.parts) {
      before_.push_back(part.continued() ? add_buffer(plan_, StateKind::state) : -1);
      d_behind_.push_back(part.continues() ? add_buffer(plan_, StateKind::state) : -1);
    }
    forward();
    backward();
  }
  StatePlan take() { return std::move(plan_); }

 private:
  /// Buffers of a part; -1: not sent.
  struct Slot {
    int map = -1, state = -1, d_state = -1;
  };

  /// Adds the buffers of what one rank sends.
  void add_slots(const std::vector<StatePart>& parts) {
    std::vector<Slot>& slots = slots_.emplace_back(parts.size());
    std::vector<int>&maps = maps_.emplace_back(), &gradients = gradients_.emplace_back();
    const auto add_map = [&](Slot& slot) {
      slot.map = maps.emplace_back(add_buffer(plan_, StateKind::map));
      slot.state = maps.emplace_back(add_buffer(plan_, StateKind::state));
    };
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].continues()) add_map(slots[i]);
      if (parts[i].continued())
        slots[i].d_state = gradients.emplace_back(add_buffer(plan_, StateKind::state));
    }
    for (Slot unused; std::ssize(maps) < 2 * most_maps(parts_);) add_map(unused);
    while (std::ssize(gradients) < most_gradients(parts_))
      gradients.push_back(add_buffer(plan_, StateKind::state));
  }
  const Slot& slot_of(const PartOfRank& at) const { return slots_[at.rank][at.part]; }

  void forward() {
    std::vector<StateStep>& steps = plan_.forward;
    const std::vector<int>& sent = maps_[plan_.rank];
    size_t used = 0;
    for (int part = 0; part < std::ssize(plan_.parts); ++part)
      if (plan_.parts[part].continues()) {
        steps.emplace_back(
            Summarize{part, sent[used], sent[used + 1], !plan_.parts[part].continued()});
        used += 2;
      }
    for (; used < sent.size(); used += 2)
      steps.emplace_back(Summarize{-1, sent[used], sent[used + 1], false});
    gather("maps of states", maps_, steps);
    for (int part = 0; part < std::ssize(plan_.parts); ++part)
      if (!plan_.parts[part].continued()) run(part, steps);
    steps.emplace_back(Wait{0});
    std::map<int64_t, int> previous;  // by document: the last part that is done
    for (const int part : parts_by_place(plan_, Pass::forward)) {
      const StatePart& own = plan_.parts[part];
      if (!own.continued()) continue;
      const std::vector<PartOfRank>& chain = parts_.chain(own);
      Compose compose{before_[part], -1, {}};
      int place = 0;
      if (const auto done = previous.find(own.document); done != previous.end()) {
        compose.start = before_[done->second];
        place = plan_.parts[done->second].place;
      }
      for (; place < own.place; ++place)
        compose.terms.push_back({slot_of(chain[place]).map, slot_of(chain[place]).state});
      steps.emplace_back(compose);
      run(part, steps);
      previous[own.document] = part;
    }
  }
  void backward() {
    std::vector<StateStep>& steps = plan_.backward;
    const std::vector<int>& sent = gradients_[plan_.rank];
    size_t used = 0;
    for (int part = 0; part < std::ssize(plan_.parts); ++part)
      if (plan_.parts[part].continued()) steps.emplace_back(SummarizeBack{part, sent[used++]});
    while (used < sent.size()) steps.emplace_back(SummarizeBack{-1, sent[used++]});
    gather("gradients of states", gradients_, steps);
    for (int part = 0; part < std::ssize(plan_.parts); ++part)
      if (!plan_.parts[part].continues()) run(part, steps);
    steps.emplace_back(Wait{0});
    std::map<int64_t, int> previous;
    for (const int part : parts_by_place(plan_, Pass::backward)) {
      const StatePart& own = plan_.parts[part];
      if (!own.continues()) continue;
      const std::vector<PartOfRank>& chain = parts_.chain(own);
      Compose compose{d_behind_[part], -1, {}};
      int place = own.places - 1;
      if (const auto done = previous.find(own.document); done != previous.end()) {
        compose.start = d_behind_[done->second];
        place = plan_.parts[done->second].place;
      }
      for (; place > own.place; --place)
        compose.terms.push_back({slot_of(chain[place]).map, slot_of(chain[place]).d_state});
      steps.emplace_back(compose);
      run(part, steps);
      previous[own.document] = part;
    }
  }
  void gather(const char* what, const std::vector<std::vector<int>>& buffers,
              std::vector<StateStep>& steps) const {
    Exchange exchange;
    exchange.what = what;
    exchange.all_gather = true;
    exchange.sends = {{plan_.rank, buffers[plan_.rank]}};
    for (size_t r = 0; r < buffers.size(); ++r)
      exchange.recvs.push_back({static_cast<int>(r), buffers[r]});
    steps.emplace_back(exchange);
  }
  /// Runs a part with the states of its ends that this rank has.
  void run(int part, std::vector<StateStep>& steps) const {
    Run run;
    run.part = part;
    run.before = before_[part];
    if (&steps == &plan_.backward) run.d_behind = d_behind_[part];
    steps.emplace_back(run);
  }

  StatePlan plan_;
  const StateParts& parts_;
  std::vector<std::vector<Slot>> slots_;            // [cp][parts of the rank]
  std::vector<std::vector<int>> maps_, gradients_;  // [cp] what a rank sends
  std::vector<int> before_, d_behind_;              // [parts]
};

StatePlan plan(const RecurrenceProblem& problem, int rank) {
  return Gather(problem, rank).take();
}

StateForm closed_form(const RecurrenceProblem& problem, int, Pass pass) {
  if (!problem.parts.crosses()) return {};
  const RecurrenceShape& shape = problem.shape;
  const bool forward = pass == Pass::forward;
  const int64_t slots = forward ? most_maps(problem.parts) : most_gradients(problem.parts);
  const int64_t of_slot = (forward ? shape.map_elements() : 0) + shape.state_elements();
  return {1, (problem.cp() - 1) * slots * shape.value_heads * of_slot * 4};
}

}  // namespace

StateSchedule state_gather_schedule() {
  return {.name = "state-gather",
          .summary = "all-gather of the maps of states, composed by every rank",
          .plan = plan,
          .closed_form = closed_form,
          .maps = maps_of_chains,
          .why_not = state_refusal};
}

}  // namespace gyre
