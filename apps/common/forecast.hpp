#pragma once
// Predictions of the cases of a run by the model of this machine, in the file of --machine: their
// times stand beside the measured ones and, with --auto, decide which case runs.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "predict/machine.hpp"
#include "report/app.hpp"

namespace gyre {

/// Reads the model, which is of CPUs with one thread a rank. Returns none without one, or if
/// `not_modelled` says why it does not apply to the run. Throws a usage error for these reasons if
/// `automatic` is set. Collective.
std::optional<MachineModel> read_forecast_model(const AppContext& context, bool automatic,
                                                const std::string& not_modelled);

/// Returns [count] seconds that `predict` writes on rank 0, NaN where it writes none. If it throws
/// a usage error, the rest stays unknown and `refusal` is the message on rank 0. Collective.
std::vector<double> forecast_seconds(Communicator& world, size_t count,
                                     const std::function<void(std::span<double>)>& predict,
                                     std::string& refusal);

/// Returns the index of the shortest of the predicted times. Throws a usage error of --auto with
/// the refusal of rank 0 if all are unknown. Collective.
size_t fastest_forecast(Communicator& world, std::span<const double> seconds,
                        const std::string& refusal);

/// A case, and its times in ms; 0 or NaN: unknown.
struct ForecastCase {
  std::string name;
  double predicted = 0, measured = 0;
};
/// A "#" line: the case that is predicted to be the fastest, and the fastest one that was measured;
/// "" without cases of which both times are known.
std::string forecast_line(int64_t tokens, std::vector<ForecastCase> cases);

}  // namespace gyre
