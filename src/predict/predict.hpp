#pragma once
// The time of a schedule on a machine, from the plans of all ranks, without keeping them.

#include <array>
#include <set>
#include <string>
#include <vector>

#include "attention/schedules/schedule.hpp"
#include "predict/machine.hpp"
#include "predict/program.hpp"
#include "predict/simulate.hpp"

namespace gyre {

/// One direction of a schedule on a machine.
struct PassPrediction {
  Pass pass = Pass::forward;
  double seconds = 0;      ///< until the last rank has ended
  double kernel_mean = 0;  ///< seconds of the kernel as if nothing were sent beside it, over ranks
  double kernel_most = 0;
  double compute_only = 0;    ///< the slowest rank as if nothing were sent
  double copies_most = 0;     ///< seconds of copies for messages, of the rank that has most
  double extrapolated = 0;    ///< share of the kernel's time outside of its surface
  int64_t pairs = 0;          ///< of all ranks, times query heads
  int64_t messages_most = 0;  ///< of a rank
  int64_t bytes_most = 0;     ///< sent by a rank
  std::vector<int64_t> bytes_by_tier;        ///< of all ranks
  int64_t transient_bytes = 0;               ///< as PlanCount, of the rank that has most
  std::set<CollectiveAlgorithm> algorithms;  ///< of a library's all-gathers and reduce-scatters

  /// What communication adds; 0 where the two differ by rounding.
  double exposed() const;
  /// What most of the time beyond a perfectly divided kernel goes to.
  enum class Bound { kernel, imbalance, network, copies };
  Bound bound() const;
};
const char* name_of(PassPrediction::Bound bound);

/// What a prediction is of.
struct PredictedProblem {
  const Schedule& schedule;
  const AttentionProblem& problem;
  const ElementTypes& types;
  GroupPlace place = {};
};

/// Forward, then backward if `problem.passes` asks for both. Plans are made by
/// OpenMP's threads, a few at a time, and dropped: O(operations) time, and memory that grows with
/// the different blocks of steps and the ranks. Throws the schedule's refusal and the kernel
/// model's as usage errors.
std::vector<PassPrediction> predict(const PredictedProblem& of, const MachineModel& machine);

}  // namespace gyre
