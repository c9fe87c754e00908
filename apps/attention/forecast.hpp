#pragma once
// Predictions of the cases of a run by the model of this machine, in the file of --machine: their
// times stand beside the measured ones and, with --auto, decide which case runs.

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "apps/attention/case.hpp"
#include "apps/attention/setup.hpp"
#include "predict/machine.hpp"
#include "report/app.hpp"

namespace gyre {

/// A schedule under a layout, and its predicted times.
struct AttentionChoice {
  const Schedule& schedule;
  const LayoutKind& layout;
  std::vector<double> seconds;  ///< [passes of the options]; NaN: unknown
  double total() const;
};

/// Predicts the times of the cases of a run, and chooses the case of --auto.
class Forecast {
 public:
  /// Reads the model. It is one of CPUs with one thread a rank: runs on GPUs, emulated and replayed
  /// runs get no predictions. Throws a usage error if --auto gets none. Collective.
  Forecast(const AttentionOptions& o, const AppContext& context);
  /// The schedules and layouts of the options, in the order of the registries; with --auto, the one
  /// of the shortest predicted time for this workload. Collective.
  std::vector<AttentionChoice> choices(const AttentionWorkload& workload) const;

 private:
  std::vector<double> seconds(const AttentionWorkload& workload, const AttentionChoice& choice,
                              std::string& refusal) const;
  const AttentionOptions& o_;
  Communicator& world_;
  std::optional<MachineModel> machine_;
};

/// "#" lines, one for each number of tokens whose times were predicted: the case that is predicted
/// to be the fastest, and the fastest one that was measured. Times are means over `cycles`.
std::string forecast_text(const std::vector<AttentionResult>& results, int cycles);

}  // namespace gyre
