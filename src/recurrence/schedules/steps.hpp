#pragma once
// Parts of plans that several schedules share.

#include "recurrence/plan.hpp"

namespace gyre {

/// A plan of `rank` without steps and buffers.
StatePlan empty_state_plan(const RecurrenceProblem& problem, int rank);
/// Adds a buffer and returns its number.
int add_buffer(StatePlan& plan, StateKind kind);
/// Adds Run steps of the parts whose documents begin and end on this rank.
void run_whole_documents(const StatePlan& plan, const StateChain& chain,
                         std::vector<StateStep>& steps);

}  // namespace gyre
