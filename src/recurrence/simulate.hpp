#pragma once
// Walks the plans of all ranks in time, on a model of a machine.

#include <vector>

#include "recurrence/plan.hpp"

namespace gyre {

/// A machine whose ranks compute at one rate, and whose messages take latency + bytes / bandwidth;
/// messages of a rank follow one another. All-gathers and all-to-alls are cp - 1 messages, an
/// all-reduce is 2 (cp - 1).
struct StateMachine {
  double flops_per_s = 1e12, bytes_per_s = 1e9, latency_s = 1e-6;
};

struct StateTimes {
  std::vector<double> end;   ///< [cp] seconds at which a rank is done
  std::vector<double> wait;  ///< [cp] seconds that a rank waits for messages
};
/// Throws a runtime error if ranks wait for messages that nobody sends.
StateTimes simulate(const std::vector<StatePlan>& plans, Pass pass, const RecurrenceShape& shape,
                    const StateMachine& machine);

}  // namespace gyre
