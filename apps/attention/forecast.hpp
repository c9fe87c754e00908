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

class Forecast {
 public:
  /// Reads the model. A run whose times the model is not about (a GPU, emulation, a replay, another
  /// number of threads) has none. Throws a usage error if --auto needs one. Collective.
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
/// to be the fastest, and the fastest one that was measured.
std::string forecast_text(const std::vector<AttentionResult>& results);

}  // namespace gyre
