#pragma once
// Predicts a recurrent layer from the plans of states of all ranks, with the links, collectives and
// engine of attention (program.hpp, simulate.hpp).
//
//     step of the plan                   operations
//     Run, Summarize, SummarizeBack,     spend: RecurrenceRate, and what transfers slow it down;
//     Compose, Join                      successive ones of a kind are one call of the kernel
//     Exchange                           send ..., receive ...; states leave from where they lie
//     Exchange: all-gather               join; all-reduce: two, of a block each
//     HeadExchange                       spend (packing), send to and receive from every other rank
//     Wait                               wait, spend (unpacking heads)
//     Convolve, ConvolveSlopes,          spend: bytes at the rate of elementwise operations
//     ConvolveBack

#include <string>
#include <vector>

#include "predict/predict.hpp"
#include "recurrence/schedules/schedule.hpp"

namespace gyre {

struct PredictedRecurrence {
  const StateSchedule& schedule;
  const RecurrenceProblem& problem;
  std::string kind;  ///< of the machine's rates
  GroupPlace place = {};
};

/// A prediction for each pass. `pairs` are tokens times heads of values. Memory of a rank's plan is
/// that of its buffers; see recurrence_bytes(). Throws the refusals of the schedule, and a machine
/// without the kind, as usage errors.
std::vector<PassPrediction> predict(const PredictedRecurrence& predicted,
                                    const std::vector<Pass>& passes, const MachineModel& machine);

}  // namespace gyre
