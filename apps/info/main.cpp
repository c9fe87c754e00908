// gyre-info: describes this machine and this build, and measures what they can do.

#include <fmt/format.h>

#include <optional>

#include "apps/info/options.hpp"
#include "apps/info/report.hpp"
#include "comm/agree.hpp"
#include "harness/host.hpp"
#include "io/h5.hpp"
#include "machine/measure.hpp"
#include "predict/calibrate.hpp"
#include "report/app.hpp"
#include "runtime/output_guard.hpp"

namespace {

using namespace gyre;

ExitCode run(InfoOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_options(o, world.size()); });
  plan_outputs(context, {{}, {{"--json", o.json}}});
  Backend backend(context, o.backend);
  RunReport report = begin_report(
      context, {{"quick", o.quick}, {"seconds", o.seconds}, {"threads", int64_t{o.threads}}},
      {{"hdf5", h5::library_version()}});
  backend.describe(report);
  if (!context.quiet)
    context.outputs.print(header_text(report) + identity_text(report) + capabilities_text());
  std::optional<MeasuredMachine> measured;
  std::optional<MachineModel> model;
  if (!o.quick) {
    backend.check_messages(false);
    measured = measure_machine(report.machine.identity, {world, backend.world(), backend.stream()},
                               {o.threads, o.seconds});
    if (o.model)
      model = calibrate({world, backend.world(), backend.stream(), o.threads}, *measured,
                        o.head_dims, model_name(report.machine.identity, world.size()));
    measured->time = utc_now();
  }
  const std::string crowd = crowding(context, o.threads);
  std::string text;
  run_on_root(world, "report", [&] {
    context.outputs.add_text(
        o.json, o.json.empty() ? "" : machine_document(report, measured, model, utc_now()));
    if (measured) text = measured_text(*measured, crowd);
  });
  context.outputs.publish(text);
  return ExitCode::ok;
}

}  // namespace

int main(int argc, char** argv) {
  InfoOptions options;
  const AppInfo info{"gyre-info", "Says what this machine and this build can do, measured.",
                     "Examples: gyre-info --quick\n"
                     "          mpirun -n 4 gyre-info --json machine.json\n"
                     "          mpirun -n 4 gyre-attention --machine machine.json --json a.json",
                     false};
  return run_app(
      argc, argv, info, [&](CLI::App& app) { declare_options(app, options); },
      [&](AppContext& context) { return run(options, context); });
}
