#include "apps/attention/forecast.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "apps/common/forecast.hpp"
#include "predict/predict.hpp"

namespace gyre {
namespace {

/// Returns why the model of the machine does not apply to this run; "" if it does.
std::string not_modelled(const AttentionOptions& o) {
  if (o.backend.on_gpu()) return "the model of --machine is of kernels on CPUs";
  if (o.emulates_compute() || !o.network.empty())
    return "the model of --machine is not of an emulated machine";
  if (o.mask.selects_keys()) return "the model of --machine has no rates of selected keys";
  if (o.replay) return "ranks take turns in a replay";
  if (o.threads != 1) return "the model of --machine is of ranks with one thread";
  return "";
}

}  // namespace

double AttentionChoice::total() const {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

Forecast::Forecast(const AttentionOptions& o, const AppContext& context)
    : o_(o),
      world_(context.world),
      machine_(read_forecast_model(context, o.automatic, not_modelled(o))) {}

std::vector<double> Forecast::seconds(const AttentionWorkload& workload,
                                      const AttentionChoice& choice, std::string& refusal) const {
  const std::vector<Pass> passes = o_.passes();
  if (!machine_) return std::vector<double>(passes.size(), std::nan(""));
  const auto predicted = [&](std::span<double> all) {
    const PlacedAttention placed(workload, setup_of(o_, choice.schedule, choice.layout, 0));
    for (const PassPrediction& p :
         predict({choice.schedule, placed.problem, o_.types()}, *machine_))
      for (size_t i = 0; i < passes.size(); ++i)
        if (passes[i] == p.pass) all[i] = p.seconds;
  };
  return forecast_seconds(world_, passes.size(), predicted, refusal);
}

std::vector<AttentionChoice> Forecast::choices(const AttentionWorkload& workload) const {
  std::vector<AttentionChoice> all;
  std::vector<double> totals;
  std::string refusal;
  const auto counts = [&](const Schedule& schedule) {
    const bool may_win = schedule.competes || !o_.automatic || o_.schedule.name != "all";
    return may_win && o_.schedule.wants(schedule.name);
  };
  for (const Schedule& schedule : schedules())
    for (const LayoutKind& layout : layout_kinds())
      if (counts(schedule) && o_.layout.wants(layout.name)) {
        all.push_back({schedule, layout, {}});
        all.back().seconds = seconds(workload, all.back(), refusal);
        totals.push_back(all.back().total());
      }
  if (!o_.automatic) return all;
  return {all[fastest_forecast(world_, totals, refusal)]};
}

std::string forecast_text(const std::vector<AttentionResult>& results, int cycles) {
  std::map<int64_t, std::vector<ForecastCase>> of_tokens;
  for (const AttentionResult& r : results) {
    std::vector<ForecastCase>& all = of_tokens[r.tokens];
    const std::string name = fmt::format("{} under {}", r.schedule, r.layout);
    auto times = std::ranges::find(all, name, &ForecastCase::name);
    if (times == all.end()) times = all.insert(all.end(), {name});
    times->predicted += r.predicted_ms / cycles;
    times->measured += r.time_ms.median / cycles;
  }
  std::string text;
  for (const auto& [tokens, all] : of_tokens) text += forecast_line(tokens, all);
  return text;
}

}  // namespace gyre
