#pragma once
// The parts of a predicted scoring pass (scoring.hpp) that depend on a few choices each, so that
// passes of many choices share them:
//
//     AttentionPart    schedule, layout of softmax attention
//     StatesPart       schedule of states, layout of recurrent layers
//     RelayoutPart     both layouts
//
// A part is of one layer over one bin, simulated on all ranks from the plans that gyre-pipeline
// executes.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/scoring.hpp"
#include "predict/machine.hpp"
#include "predict/predict.hpp"

namespace gyre {

/// Messages and bytes that each rank of a context-parallel group sends.
struct SentByRanks {
  std::vector<RecurrentTraffic> ranks;  ///< [cp], or empty: nothing

  void add(const SentByRanks& other, int64_t times);
  /// The most messages and the most bytes of a rank.
  RecurrentTraffic most() const;
  int64_t bytes() const;  ///< of all ranks
};

/// A layer of softmax attention.
struct AttentionPart {
  std::vector<PassPrediction> masks;  ///< [layer_masks(config)]
  int64_t slots = 0;                  ///< of a rank
};

/// How states pass in a recurrent layer, and its kernel.
struct StatesPart {
  PassPrediction pass;
  SentByRanks sent;
  int64_t slots = 0;  ///< of a rank
};

/// The changes of layout around a recurrent layer. `projected` is as RecurrentPrediction has it.
struct RelayoutPart {
  PassPrediction there, back;
  double projected_seconds = 0;
  SentByRanks sent, projected;
  int64_t rows = 0;  ///< slots and halos of the rank that has most
};

/// A bin, and the first rank of a replica that has it.
struct BinPlace {
  const PackedBatch* bin = nullptr;
  int64_t first = 0;
};

/// Simulates parts of bins of a plan. All arguments must outlive it.
class PartSimulation {
 public:
  PartSimulation(const ScoringPlan& plan, const ModelConfig& config, const MachineModel& machine)
      : plan_(plan), config_(config), machine_(machine) {}

  /// Throws the usage errors of layout and schedule.
  AttentionPart attention(const BinPlace& at) const;
  /// Throws the usage errors of layout and schedule, as for a model with recurrent layers.
  StatesPart states(const BinPlace& at) const;
  /// Precondition: states() does not throw.
  RelayoutPart relayout(const BinPlace& at) const;

 private:
  GroupPlace place(const BinPlace& at) const { return {at.first, plan_.setup.grid.tp}; }
  /// Type of the machine's rates of recurrences in `computed`.
  DType rated_type(DType computed) const;

  const ScoringPlan& plan_;
  const ModelConfig& config_;
  const MachineModel& machine_;
};

/// Equal keys: equal simulations by one setup.
struct BinKey {
  int cp = 1, tp = 1;
  std::vector<int32_t> real, padded;               ///< boundaries
  std::vector<std::pair<int32_t, int64_t>> nodes;  ///< of trees: descendants, length
  int64_t place = 0;  ///< the first rank's position inside the last tier but one
  friend auto operator<=>(const BinKey&, const BinKey&) = default;
};
/// Names of the choices, and the bin.
using PartKey = std::pair<std::string, BinKey>;

struct ScoringParts {
  std::map<PartKey, AttentionPart> attention;
  std::map<PartKey, StatesPart> states;
  std::map<PartKey, RelayoutPart> relayout;
};

}  // namespace gyre
