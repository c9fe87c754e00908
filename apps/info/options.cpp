#include "apps/info/options.hpp"

#include "core/error.hpp"
#include "report/options.hpp"

namespace gyre {
namespace {

constexpr double least_seconds = 1e-3, max_seconds = 60;
constexpr int max_head_dim = 512;

}  // namespace

void declare_options(CLI::App& app, InfoOptions& o) {
  add_flag(app, {"--quick", "Say what the machine is, and measure nothing"}, o.quick);
  add_flag(
      app,
      {"--model", "Measure what gyre-predict needs, too: kernels of all shapes, for half a minute"},
      o.model);
  add_option(app, {"--model-head-dims", "With --model: head dimensions of the kernels"},
             o.head_dim_list);
  add_option(app, {"--seconds", "Of a window in which a rate is measured; there are some 40"},
             o.seconds);
  add_option(app, {"--threads", "Threads of a rank that measure together"}, o.threads, 1);
  declare_backend_options(app, o.backend);
  add_option(app, {"-J,--json", "Write it here (gyre-machine/1), for --machine of other programs"},
             o.json);
}

void check_options(InfoOptions& o, int ranks) {
  const InfoOptions usual;
  ConfigErrors errors;
  if (!(o.seconds >= least_seconds && o.seconds <= max_seconds))
    errors.add("--seconds {}: {} to {}", o.seconds, least_seconds, max_seconds);
  else if (o.quick && o.seconds != usual.seconds)
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

}  // namespace gyre
