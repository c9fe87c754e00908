#pragma once
// An entry of the registry of schedules of states; each is defined in one file.

#include <string>
#include <vector>

#include "recurrence/plan.hpp"

namespace gyre {

/// Bytes and messages that a rank sends in a pass, by formula.
struct StateForm {
  int64_t messages = 0;
  int64_t bytes_sent = 0;
};

/// The functions are references, which cannot be left out.
struct StateSchedule {
  std::string name;
  std::string summary;
  /// The plan of one rank. Precondition: why_not() is empty.
  StatePlan (&plan)(const RecurrenceProblem& problem, int rank);
  /// Messages and bytes of that plan, without reading its steps and without a convolution's.
  StateForm (&closed_form)(const RecurrenceProblem& problem, int rank, Pass pass);
  /// The most maps that are applied to one state.
  int64_t (&maps)(const RecurrenceProblem& problem);
  /// Why this schedule cannot do the problem; "" if it can.
  std::string (&why_not)(const RecurrenceProblem& problem);
  /// Ranks compute whole documents, so that a convolution reads no history of another rank.
  bool whole_documents = false;
};

/// Entries in the order of list.hpp; the first is the default.
const std::vector<StateSchedule>& state_schedules();

/// The plan of one rank, with the steps of the convolution if there is one. Throws a usage error if
/// the schedule cannot do the problem.
StatePlan plan_rank(const StateSchedule& schedule, const RecurrenceProblem& problem, int rank);
/// Messages and bytes of that plan, by formula.
StateForm closed_form(const StateSchedule& schedule, const RecurrenceProblem& problem, int rank,
                      Pass pass);

}  // namespace gyre
