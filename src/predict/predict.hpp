#pragma once
// Predicts the time of a schedule on a machine from the plans of all ranks, without keeping them.

#include <array>
#include <set>
#include <string>
#include <vector>

#include "attention/schedules/schedule.hpp"
#include "predict/machine.hpp"
#include "predict/program.hpp"
#include "predict/simulate.hpp"

namespace gyre {

/// A forward or a backward pass on a machine.
struct PassPrediction {
  Pass pass = Pass::forward;
  double seconds = 0;      ///< until the last rank ends
  double kernel_mean = 0;  ///< kernel seconds without concurrent transfers, mean over ranks
  double kernel_most = 0;
  double compute_only = 0;                   ///< time of the slowest rank without messages
  double copies_most = 0;                    ///< copy seconds for messages, maximum over ranks
  double extrapolated = 0;                   ///< fraction of the kernel's time at unmeasured sizes
  int64_t pairs = 0;                         ///< over all ranks, times query heads
  int64_t messages_most = 0;                 ///< maximum over ranks
  int64_t bytes_most = 0;                    ///< sent by a rank, maximum over ranks
  std::vector<double> bytes_by_tier;         ///< over all ranks
  int64_t transient_bytes = 0;               ///< copies and blocks of the neediest rank
  std::set<CollectiveAlgorithm> algorithms;  ///< that the library's collectives use

  /// Time that communication adds; 0 where the difference is rounding.
  double exposed() const;
  /// Main cause of the time beyond an evenly divided kernel.
  enum class Bound { kernel, imbalance, network, copies };
  Bound bound() const;
};
const char* name_of(PassPrediction::Bound bound);

/// Runs the programs of all ranks. Sets all fields of `result` that depend on times or costs.
void add_times(PassPrediction& result, const Programs& programs, const MachineModel& machine,
               const std::string& schedule);

struct PredictedProblem {
  const Schedule& schedule;
  const AttentionProblem& problem;
  const ElementTypes& types;
  GroupPlace place = {};
};

/// The threads that OpenMP's settings ask for, but no more than there are processors: each thread
/// needs a stack.
int wanted_threads();

/// Predicts forward, then backward if `problem.passes` asks for both. OpenMP threads make a few
/// plans at a time and drop them: O(operations) time, and memory that grows with the number of
/// distinct blocks and of ranks. Throws the refusals of the schedule and of the kernel model as
/// usage errors.
std::vector<PassPrediction> predict(const PredictedProblem& predicted, const MachineModel& machine);

}  // namespace gyre
