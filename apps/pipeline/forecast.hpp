#pragma once
// The predicted time of a pass by the model of --machine, and the schedules and layouts of --auto.

#include <string>

#include "apps/pipeline/options.hpp"
#include "report/app.hpp"

namespace gyre {

/// The model and the documents of a predicted pass.
struct ForecastInputs {
  const ModelConfig& config;
  const std::string& tokenizer;
  const Documents& documents;
};

/// Returns the predicted seconds of a pass; NaN if they are unknown: --machine has no model, or none
/// of such a run. With --auto it tries each schedule under each layout, and of recurrent layers too,
/// and sets the options to those of the shortest time; options that differ from their default stay.
/// Throws a usage error if --auto gets no prediction. Collective.
double forecast_pass(PipelineOptions& o, const ForecastInputs& inputs, const AppContext& context);

/// A "#" line: the predicted and the measured time; "" if one is unknown.
std::string forecast_text(const ScoringResult& result, const ScoringPlan& plan);

}  // namespace gyre
