// gyre-info: describes this machine and this build, and measures what they can do.

#include <fmt/format.h>

#include <optional>
#include <string>
#include <vector>

#include "apps/info/report.hpp"
#include "comm/agree.hpp"
#include "core/error.hpp"
#include "harness/backend.hpp"
#include "io/h5.hpp"
#include "machine/measure.hpp"
#include "predict/calibrate.hpp"
#include "report/app.hpp"
#include "report/options.hpp"
#include "supervision/output_guard.hpp"

namespace {

using namespace gyre;

struct InfoOptions {
  BackendOptions backend;
  bool quick = false, model = false;
  double seconds = 0.1;
  int threads = 1;
  std::string head_dim_list = "32,64,128";
  std::vector<int> head_dims;  ///< set by check_options
  std::string json;
};

constexpr int max_head_dim = 512;

void declare_options(OptionTable& table, InfoOptions& o) {
  const AddOptions add(table);
  add.flag("--quick", "Say what the machine is, and measure nothing", o.quick);
  add.flag("--model",
           "Measure what gyre-predict needs, too: kernels of all shapes, for half a minute",
           o.model);
  add("--model-head-dims", "With --model: head dimensions of the kernels", o.head_dim_list);
  add("--seconds", "Length of a window in which a rate is measured; a run has about 40", o.seconds,
      {1e-3, 60});
  add("--threads", "Threads of a rank that measure together", o.threads, 1);
  declare_backend_options(table, o.backend);
  add("-J,--json", "Write the measurements here (gyre-machine/1), for --machine of other programs",
      o.json)
      .writes_text();
}

/// Throws a usage error that lists all problems of the options in a run of `ranks` ranks.
void check_options(InfoOptions& o, int ranks) {
  const InfoOptions usual;
  ConfigErrors errors;
  if (o.quick && o.seconds != usual.seconds)
    errors.add("--seconds {}: --quick measures nothing", o.seconds);
  if (o.quick && o.threads != usual.threads)
    errors.add("--threads {}: --quick measures nothing", o.threads);
  if (o.model && o.quick) errors.add("--model: --quick measures nothing");
  if (o.model && o.json.empty()) errors.add("--model goes into the file of --json: name one");
  if (o.json.ends_with(".jsonl"))
    errors.add("--json {0}: gyre-machine/1 is one document of many lines; such as --json {1}",
               o.json, o.json.substr(0, o.json.size() - 1));
  o.head_dims = parse_numbers("--model-head-dims", o.head_dim_list,
                              {"elements of a head", 1, max_head_dim, "64,128"}, errors);
  if (!o.model && o.head_dim_list != usual.head_dim_list)
    errors.add("--model-head-dims {}: without --model, none are measured", o.head_dim_list);
  if (o.model && ranks < 2)
    errors.add("--model in a run of {} rank: it measures messages; 2 ranks or more", ranks);
  errors.throw_if_any("impossible configuration");
}

ExitCode run(InfoOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_options(o, world.size()); });
  plan_outputs(context);
  Backend backend(context, o.backend);
  RunReport report = begin_report(context, {}, {{"hdf5", h5::library_version()}});
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
      argc, argv, info, [&](OptionTable& table) { declare_options(table, options); },
      [&](AppContext& context) { return run(options, context); });
}
