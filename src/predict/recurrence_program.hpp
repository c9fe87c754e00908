#pragma once
// Predicts a recurrent layer from the plans of states of all ranks, with the links, collectives and
// engine of attention (program.hpp, simulate.hpp).
//
//     step of the plan                   operations
//     Run, Summarize, SummarizeBack,     spend: time by RecurrenceRate, longer beside transfers;
//     Compose, Join                      consecutive steps of one kind are one call of the kernel
//     Exchange                           send ..., receive ...; states leave from where they lie
//     Exchange: all-gather               join; all-reduce: two, of a block each
//     HeadExchange                       spend (packing), send to and receive from every other rank
//     Wait                               wait, spend (unpacking heads)
//     Convolve, ConvolveSlopes,          spend: bytes at the rate of elementwise operations
//     ConvolveBack

#include <optional>
#include <string>
#include <vector>

#include "predict/predict.hpp"
#include "recurrence/schedules/schedule.hpp"

namespace gyre {

/// A recurrence of one kind on a machine.
struct RecurrenceOnMachine {
  const RecurrenceShape& shape;
  std::string kind;             ///< of the machine's rates
  const std::string& schedule;  ///< for errors
  const MachineModel& machine;
  GroupPlace place = {};
  std::optional<DType> rates = {};  ///< type of the machine's rates; none: that of the plan
};

/// Times of the plans of all ranks. Throws a runtime error if ranks wait for messages that nobody
/// sends.
std::vector<RankTimes> times_of(const std::vector<StatePlan>& plans, Pass pass,
                                const RecurrenceOnMachine& recurrence);

struct PredictedRecurrence {
  const StateSchedule& schedule;
  const RecurrenceProblem& problem;
  std::string kind;  ///< of the machine's rates
  GroupPlace place = {};
  std::optional<DType> rates = {};  ///< type of the machine's rates; none: that of the problem
};

/// Predicts each pass. Tokens times heads of values stand for pairs. Transient bytes are those of
/// transient_bytes(). Throws a usage error if the schedule refuses, or the machine has no rate.
std::vector<PassPrediction> predict(const PredictedRecurrence& predicted,
                                    const std::vector<Pass>& passes, const MachineModel& machine);

}  // namespace gyre
