#pragma once
// A whole scoring pass of a model: gyre-predict --model.

#include "apps/predict/options.hpp"
#include "predict/machine.hpp"
#include "report/app.hpp"

namespace gyre {

/// Predicts the pass for each number of context-parallel ranks, size, schedule and layout, prints
/// the rows and reports them.
ExitCode predict_model(const PredictOptions& o, const MachineModel& machine, AppContext& context);

}  // namespace gyre
