#pragma once
// Predicts a scoring pass (model/scoring.hpp) on a machine: all bins through all layers of a
// decoder, on a dp × cp × tp grid.
//
//     replica    its bins, one after the other
//     bin        decoder_steps(), each on one rank's slots; attention, recurrences and changes of
//                layout by their simulated plans
//     pass       the slowest replica
//
// All ranks of a cp group hold equally many slots and begin a layer, and each change of its layout,
// together: waits inside are not counted a second time.

#include "model/scoring.hpp"
#include "predict/machine.hpp"
#include "predict/scoring_parts.hpp"

namespace gyre {

/// The recurrent layers of the slowest replica in a pass. Changes of layout move rows of
/// `hidden_size` elements, before the layers' projections and behind them. `projected` is of an
/// alternative that gyre-pipeline does not have: the same moves of what the projections make of the
/// rows, in the same type.
struct RecurrentPrediction {
  int64_t relayouts = 0;  ///< changes of layout: two a layer and bin
  double relayout_seconds = 0, projected_seconds = 0;
  /// With the heads of one tensor-parallel rank.
  SentByRanks states, relayout, projected;

  void add(const RecurrentPrediction& other, int64_t times);
  /// All messages of such layers.
  SentByRanks sent() const;
};

struct ScoringPrediction {
  double seconds = 0;       ///< of the slowest replica
  double mean_seconds = 0;  ///< mean over replicas
  DecoderTimes times;       ///< of the slowest replica
  double extrapolated = 0;  ///< fraction of the kernels' time at unmeasured sizes
  double bytes_sent = 0;    ///< by attention, over all ranks
  int64_t pairs = 0;        ///< as ScoringPlan::pairs, counted from the plans
  /// Bytes on one rank for its largest bin, without the weights.
  int64_t activation_bytes = 0;
  RecurrentPrediction recurrent;
  int64_t recurrent_bytes = 0;  ///< by recurrent layers, over all ranks
  double exposed() const { return times.exposed() / seconds; }
  /// Imbalance over replicas: max / mean - 1.
  double imbalance() const { return seconds / mean_seconds - 1; }
};

/// Predicts passes of a model on a machine under several schedules and layouts.
class ScoringPredictor {
 public:
  /// Both arguments must outlive it.
  ScoringPredictor(const ModelConfig& config, const MachineModel& machine);

  /// Activations and weights have the types of the setup. Equal bins in equal places are simulated
  /// once, also if they are of several plans. Plans may differ in documents, dp, cp, schedules and
  /// layouts, in nothing else. Throws the usage errors of layouts, schedules, and machines that
  /// lack rates for those types.
  ///
  /// Between its projections a recurrent layer is f32. A machine without rates of such recurrences
  /// counts with those of the type of activations.
  ScoringPrediction predict(const ScoringPlan& plan);

 private:
  const ModelConfig& config_;
  const MachineModel& machine_;
  ScoringParts parts_;  ///< simulated so far
};

}  // namespace gyre
