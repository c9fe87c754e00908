#pragma once
// Predicts a scoring pass (model/scoring.hpp) on a machine: all bins through all layers of a
// decoder, on a dp × cp × tp grid.
//
//     replica    its bins, one after the other
//     bin        decoder_steps(), each on one rank's slots; attention by its simulated plans
//     pass       the slowest replica
//
// All ranks of a cp group hold equally many slots and begin a layer together: waits inside
// attention are not counted a second time.

#include <vector>

#include "model/scoring.hpp"
#include "predict/machine.hpp"

namespace gyre {

struct ScoringPrediction {
  double seconds = 0;       ///< of the slowest replica
  double mean_seconds = 0;  ///< mean over replicas
  DecoderTimes times;       ///< of the slowest replica
  double extrapolated = 0;  ///< fraction of the kernels' time at unmeasured sizes
  double bytes_sent = 0;    ///< by attention, over all ranks
  int64_t pairs = 0;        ///< as ScoringPlan::pairs, counted from the plans
  /// Bytes on one rank for its largest bin, without the weights.
  int64_t activation_bytes = 0;
  double exposed() const { return times.exposed() / seconds; }
  /// Imbalance over replicas: max / mean - 1.
  double imbalance() const { return seconds / mean_seconds - 1; }
};

/// Activations and weights have the types of the setup. Equal bins in equal places are simulated
/// once. Throws the usage errors of layouts, schedules, and machines that lack rates
/// for those types. Throws a usage error for a model with recurrent layers.
ScoringPrediction predict_scoring(const ScoringPlan& plan, const ModelConfig& config,
                                  const MachineModel& machine);

}  // namespace gyre
