#pragma once
// The time of a scoring pass (model/scoring.hpp) on a machine: all bins through all layers of a
// decoder, on a dp × cp × tp grid.
//
//     replica    its bins, one after the other
//     bin        decoder_steps(), each on slots of one rank; attention by its simulated plans
//     pass       the slowest replica
//
// All ranks of a cp group hold equally many slots, and begin a layer together: a rank that waits in
// attention is not waited for again.

#include <vector>

#include "model/scoring.hpp"
#include "predict/machine.hpp"

namespace gyre {

struct ScoringPrediction {
  double seconds = 0;       ///< of the slowest replica
  double mean_seconds = 0;  ///< of all replicas
  DecoderTimes times;       ///< of the slowest replica
  double extrapolated = 0;  ///< share of the kernels' time outside of their surfaces
  int64_t bytes_sent = 0;   ///< by attention, all ranks
  int64_t pairs = 0;        ///< of all plans, a head and layer
  /// Memory of a rank for its largest bin, beside the weights.
  int64_t activation_bytes = 0;
  double exposed() const { return times.exposed() / seconds; }
  /// What replicas that wait for the slowest one lose.
  double imbalance() const { return seconds / mean_seconds - 1; }
};

/// Activations and weights are of types.activations. Equal bins on equal places are simulated once.
/// Throws the usage errors of layouts, schedules and of machines without rates for that type.
ScoringPrediction predict_scoring(const ScoringPlan& plan, const ModelConfig& config,
                                  const ElementTypes& types, const MachineModel& machine);

}  // namespace gyre
