#include "apps/pipeline/forecast.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "apps/common/forecast.hpp"
#include "core/error.hpp"
#include "predict/scoring.hpp"

namespace gyre {
namespace {

/// Returns why the model of the machine does not apply to this run; "" if it does.
std::string not_modelled(const PipelineOptions& o) {
  if (o.dry_run) return "it chooses what runs, and --dry-run runs nothing";
  if (o.backend.on_gpu()) return "the model of --machine is of kernels on CPUs";
  if (!o.teacher.empty()) return "the model of --machine is not of divergences from a --teacher";
  return "";
}

/// The names of a registry that an option of --auto leaves to choose from.
template <class Entry>
std::vector<std::string> candidates(const std::vector<Entry>& registry, const std::string& given,
                                    const std::string& usual) {
  return given == usual ? names_of(registry) : std::vector<std::string>{given};
}

/// The options of all cases of --auto.
std::vector<PipelineOptions> cases_of(const PipelineOptions& o, bool recurs) {
  const PipelineOptions usual;
  std::vector<std::string> states = {o.state_schedule}, recurrent_layouts = {o.recurrent_layout};
  if (recurs) {
    states = candidates(state_schedules(), o.state_schedule, usual.state_schedule);
    recurrent_layouts = candidates(layout_kinds(), o.recurrent_layout, usual.recurrent_layout);
  }
  std::vector<PipelineOptions> cases;
  std::vector<Schedule> competing;
  std::ranges::copy_if(schedules(), std::back_inserter(competing), &Schedule::competes);
  for (const std::string& schedule : candidates(competing, o.schedule.name, usual.schedule.name))
    for (const std::string& layout : candidates(layout_kinds(), o.layout.name, usual.layout.name))
      for (const std::string& of_states : states)
        for (const std::string& recurrent_layout : recurrent_layouts) {
          PipelineOptions& one = cases.emplace_back(o);
          one.schedule.name = schedule;
          one.layout.name = layout;
          one.state_schedule = of_states;
          one.recurrent_layout = recurrent_layout;
        }
  return cases;
}

}  // namespace

double forecast_pass(PipelineOptions& o, const ForecastInputs& inputs, const AppContext& context) {
  const std::optional<MachineModel> machine =
      read_forecast_model(context, o.automatic, not_modelled(o));
  if (!machine) return std::nan("");
  Communicator& world = context.world;
  const std::vector<PipelineOptions> cases =
      o.automatic ? cases_of(o, inputs.config.recurrent_layers() > 0) : std::vector{o};
  std::string refusal;
  const std::vector<double> seconds = forecast_seconds(
      world, cases.size(),
      [&](std::span<double> all) {
        ScoringPredictor predictor(inputs.config, *machine);
        std::string refused;  // the reason of the first refusal
        for (size_t i = 0; i < cases.size(); ++i) try {
            all[i] = predictor
                         .predict(make_plan(cases[i], inputs.config, inputs.tokenizer,
                                            inputs.documents, world.size()))
                         .seconds;
          } catch (const Error& error) {
            if (error.code() != ExitCode::usage) throw;
            if (refused.empty()) refused = error.what();
          }
        if (std::ranges::all_of(all, [](double s) { return std::isnan(s); }))
          throw_usage("{}", refused);
      },
      refusal);
  if (!o.automatic) return seconds.front();
  const size_t best = fastest_forecast(world, seconds, refusal);
  o = cases[best];
  return seconds[best];
}

std::string forecast_text(const ScoringResult& result, const ScoringPlan& plan) {
  return forecast_line(result.tokens,
                       {{name_of_choice(plan), result.predicted_ms, result.time_ms.median}});
}

}  // namespace gyre
