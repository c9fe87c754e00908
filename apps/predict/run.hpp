#pragma once
// Predictions of gyre-predict for single configurations.

#include <string>
#include <vector>

#include "apps/predict/options.hpp"
#include "harness/row.hpp"
#include "predict/predict.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Documents to attend.
struct PredictedDocuments {
  std::vector<int64_t> offsets = {0};  ///< [documents + 1]
  std::string origin;
  int64_t tokens() const { return offsets.back(); }
};
/// The documents of each size of the options.
std::vector<PredictedDocuments> documents_of(const PredictOptions& o);

/// The machine of --machine, with the rates of --link. Throws usage errors of both.
MachineModel machine_of(const PredictOptions& o);

/// One configuration.
struct PredictedCase {
  const PredictOptions& options;
  const PredictedDocuments& documents;
  int cp;
  const Schedule& schedule;
  const LayoutKind& layout;
  const MachineModel& machine;
};

/// One direction of a configuration. FLOPs count visible pairs of all ranks of the group.
struct PredictedRow : MeasuredRow {
  std::string schedule, layout;
  int cp = 1;
  int64_t tokens = 0;
  int64_t own_bytes = 0;    ///< of a rank's own arrays in both passes
  double memory_limit = 0;  ///< bytes per rank; 0: unknown
  PassPrediction prediction;

  double tflops_per_rank() const { return flops / prediction.seconds / cp / 1e12; }
  double exposed() const { return prediction.exposed() / prediction.seconds; }
  double imbalance() const { return prediction.kernel_most / prediction.kernel_mean - 1; }
  double memory_bytes() const {
    return static_cast<double>(own_bytes + prediction.transient_bytes);
  }
  bool fits() const { return memory_limit == 0 || memory_bytes() <= memory_limit; }
  /// "outside" if over 1 % of the kernel's time is outside of the measured shapes.
  std::string surface() const { return prediction.extrapolated > 0.01 ? "outside" : "inside"; }
  /// The algorithms of the library's operations: "ring and tree", "none".
  std::string algorithms() const;
  /// The bottleneck: "kernel", "imbalance", "network", "copies", or "memory" if it does not fit.
  std::string bound() const { return fits() ? name_of(prediction.bound()) : "memory"; }
};

/// The rows of the passes of the options. Adds to `checks` that the plans have the pairs of the
/// mask. Throws a usage error if schedule or layout refuses.
std::vector<PredictedRow> predict_case(const PredictedCase& c, Verification& checks);

/// The timelines of all ranks in the form of --trace of a real run.
std::string predicted_trace(const PredictedCase& c);

}  // namespace gyre
