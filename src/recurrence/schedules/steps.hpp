#pragma once
// Parts of plans that several schedules share.

#include "recurrence/plan.hpp"

namespace gyre {

/// A plan of `rank` without steps and buffers.
StatePlan empty_state_plan(const RecurrenceProblem& problem, int rank);
/// Adds a buffer and returns its number.
int add_buffer(StatePlan& plan, StateKind kind);
/// Adds a Run step, without states, of each part whose document begins and ends with it.
void run_whole_documents(const StatePlan& plan, std::vector<StateStep>& steps);
/// The place of a part in its chain, counted from where states come from in a pass: from the first
/// part forward, from the last part backward.
int place_of(const StatePart& part, Pass pass);
/// The parts of a plan by this place, and by document: the parts that states reach first are first.
/// Ranks that work in this order never wait for one another in a circle, and two ranks send and
/// receive their messages in one order.
std::vector<int> parts_by_place(const StatePlan& plan, Pass pass);

/// The most parts of a rank that are continued or continue. Each needs a map and states.
inline constexpr int64_t most_crossing_parts = 64;
/// Why states cannot pass: a fragment of the layout is not a run of tokens, or a rank has more parts
/// than most_crossing_parts. "" if they can.
std::string state_refusal(const RecurrenceProblem& problem);
/// The most maps that are applied to a state that passes from part to part.
int64_t maps_of_chains(const RecurrenceProblem& problem);

}  // namespace gyre
