#include "apps/common/forecast.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "predict/machine_file.hpp"

namespace gyre {
namespace {

constexpr const char* how_to_get_one =
    "--auto needs --machine FILE with a model of this machine, as gyre-info --model -J FILE writes";

}  // namespace

std::optional<MachineModel> read_forecast_model(const AppContext& context, bool automatic,
                                                const std::string& not_modelled) {
  if (automatic && !not_modelled.empty()) throw_usage("--auto: {}", not_modelled);
  if (automatic && !context.machine) throw_usage("{}", how_to_get_one);
  if (!context.machine || !not_modelled.empty()) return {};
  Communicator& world = context.world;
  const std::string& path = context.machine->path;
  std::string text;
  run_on_root(world, "--machine", [&] { text = read_machine_text(path); });
  text = broadcast_string(world, text, 0);
  std::optional<MachineModel> machine;
  run_agreed(world, "--machine", [&] {
    if (Json::parse(text).contains("model"))
      machine = parse_machine_model(path, text);
    else if (automatic)
      throw_usage("{}: there is no model in it; {}", path, how_to_get_one);
  });
  return machine;
}

std::vector<double> forecast_seconds(Communicator& world, size_t count,
                                     const std::function<void(std::span<double>)>& predict,
                                     std::string& refusal) {
  std::vector<double> all(count, std::numeric_limits<double>::quiet_NaN());
  run_on_root(world, "predictions", [&] {
    try {
      predict(all);
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      refusal = error.what();
    }
  });
  HostStream stream;
  world.broadcast(std::as_writable_bytes(std::span(all)), 0, stream, "predicted times")->wait();
  return all;
}

size_t fastest_forecast(Communicator& world, std::span<const double> seconds,
                        const std::string& refusal) {
  const auto best = std::ranges::min_element(seconds, {}, [](double s) {
    return std::isnan(s) ? std::numeric_limits<double>::infinity() : s;
  });
  run_on_root(world, "--auto", [&] {
    if (best == seconds.end() || std::isnan(*best))
      throw_usage("--auto: no time can be predicted: {}", refusal);
  });
  return static_cast<size_t>(best - seconds.begin());
}

std::string forecast_line(int64_t tokens, std::vector<ForecastCase> cases) {
  std::erase_if(cases,
                [](const ForecastCase& c) { return !(c.predicted > 0) || !(c.measured > 0); });
  if (cases.empty()) return "";
  const ForecastCase& first = *std::ranges::min_element(cases, {}, &ForecastCase::predicted);
  const ForecastCase& fastest = *std::ranges::min_element(cases, {}, &ForecastCase::measured);
  std::string text =
      fmt::format("# predicted to be the fastest, {} tokens: {}, {:.4g} ms; measured {:.4g} ms",
                  tokens, first.name, first.predicted, first.measured);
  if (&first != &fastest)
    text += fmt::format("; {} took {:.4g}, {:.1f} % less", fastest.name, fastest.measured,
                        100 * (1 - fastest.measured / first.measured));
  else if (cases.size() > 1)
    text += ", the shortest";
  return text + '\n';
}

}  // namespace gyre
