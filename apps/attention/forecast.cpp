#include "apps/attention/forecast.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "predict/machine_file.hpp"
#include "predict/predict.hpp"

namespace gyre {
namespace {

/// Returns why the model of the machine does not apply to this run; "" if it does.
std::string not_modelled(const AttentionOptions& o) {
  if (o.backend.on_gpu()) return "the model of --machine is of kernels on CPUs";
  if (o.emulates_compute() || !o.network.empty())
    return "the model of --machine is not of an emulated machine";
  if (o.replay) return "ranks take turns in a replay";
  if (o.threads != 1) return "the model of --machine is of ranks with one thread";
  return "";
}

constexpr const char* how_to_get_one =
    "--auto needs --machine FILE with a model of this machine, as gyre-info --model -J FILE writes";

}  // namespace

double AttentionChoice::total() const {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

Forecast::Forecast(const AttentionOptions& o, const AppContext& context)
    : o_(o), world_(context.world) {
  const std::string reason = not_modelled(o);
  if (o.automatic && !reason.empty()) throw_usage("--auto: {}", reason);
  if (o.automatic && !context.machine) throw_usage("{}", how_to_get_one);
  if (!context.machine || !reason.empty()) return;
  const std::string& path = context.machine->path;
  std::string text;
  run_on_root(world_, "--machine", [&] { text = read_machine_text(path); });
  text = broadcast_string(world_, text, 0);
  run_agreed(world_, "--machine", [&] {
    if (Json::parse(text).contains("model"))
      machine_ = parse_machine_model(path, text);
    else if (o.automatic)
      throw_usage("{}: there is no model in it; {}", path, how_to_get_one);
  });
}

std::vector<double> Forecast::seconds(const AttentionWorkload& workload,
                                      const AttentionChoice& choice, std::string& refusal) const {
  const std::vector<Pass> passes = o_.passes();
  std::vector<double> all(passes.size(), std::numeric_limits<double>::quiet_NaN());
  if (!machine_) return all;
  run_on_root(world_, "predictions", [&] {
    try {
      const PlacedAttention placed(workload, setup_of(o_, choice.schedule, choice.layout, 0));
      for (const PassPrediction& p :
           predict({choice.schedule, placed.problem, o_.types()}, *machine_))
        for (size_t i = 0; i < passes.size(); ++i)
          if (passes[i] == p.pass) all[i] = p.seconds;
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      refusal = error.what();
    }
  });
  HostStream stream;
  world_.broadcast(std::as_writable_bytes(std::span(all)), 0, stream, "predicted times")->wait();
  return all;
}

std::vector<AttentionChoice> Forecast::choices(const AttentionWorkload& workload) const {
  std::vector<AttentionChoice> all;
  std::string refusal;
  for (const Schedule& schedule : schedules())
    for (const LayoutKind& layout : layout_kinds())
      if (o_.schedule.wants(schedule.name) && o_.layout.wants(layout.name)) {
        all.push_back({schedule, layout, {}});
        all.back().seconds = seconds(workload, all.back(), refusal);
      }
  if (!o_.automatic) return all;
  const AttentionChoice best = *std::ranges::min_element(all, {}, [](const AttentionChoice& c) {
    return std::isnan(c.total()) ? std::numeric_limits<double>::infinity() : c.total();
  });
  run_on_root(world_, "--auto", [&] {
    if (std::isnan(best.total())) throw_usage("--auto: no time can be predicted: {}", refusal);
  });
  return {best};
}

std::string forecast_text(const std::vector<AttentionResult>& results, int cycles) {
  struct Times {
    std::string schedule, layout;
    double predicted = 0, measured = 0;
  };
  std::map<int64_t, std::vector<Times>> of_tokens;
  for (const AttentionResult& r : results) {
    std::vector<Times>& all = of_tokens[r.tokens];
    auto times = std::ranges::find_if(
        all, [&](const Times& t) { return t.schedule == r.schedule && t.layout == r.layout; });
    if (times == all.end()) times = all.insert(all.end(), {r.schedule, r.layout});
    times->predicted += r.predicted_ms / cycles;
    times->measured += r.time_ms.median / cycles;
  }
  std::string text;
  for (auto& [tokens, all] : of_tokens) {
    std::erase_if(all, [](const Times& t) { return !(t.predicted > 0) || !(t.measured > 0); });
    if (all.empty()) continue;
    const Times& first = *std::ranges::min_element(all, {}, &Times::predicted);
    const Times& fastest = *std::ranges::min_element(all, {}, &Times::measured);
    text += fmt::format(
        "# predicted to be the fastest, {} tokens: {} under {}, {:.4g} ms; measured {:.4g} ms",
        tokens, first.schedule, first.layout, first.predicted, first.measured);
    if (&first != &fastest)
      text +=
          fmt::format("; {} under {} took {:.4g}, {:.1f} % less", fastest.schedule, fastest.layout,
                      fastest.measured, 100 * (1 - fastest.measured / first.measured));
    else if (all.size() > 1)
      text += ", the shortest";
    text += '\n';
  }
  return text;
}

}  // namespace gyre
