#include "apps/predict/options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <tuple>

#include "apps/common/generated_lengths.hpp"
#include "apps/common/type_options.hpp"
#include "core/error.hpp"
#include "report/options.hpp"
#include "runtime/output_guard.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

DType type_of(const std::string& name) {
  return name == "bf16" ? DType::bf16 : DType::f32;
}

/// "8,16,32": ascending or not, each once, from 1 to most_ranks.
std::vector<int> parse_cps(const std::string& text, ConfigErrors& errors) {
  std::vector<int> cps;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    int cp = 0;
    const auto [last, status] = std::from_chars(text.data() + begin, text.data() + end, cp);
    if (status != std::errc() || last != text.data() + end || cp < 1 || cp > most_ranks) {
      errors.add("--cp '{}': '{}' is no number of ranks from 1 to {}; such as --cp 8,16,32", text,
                 text.substr(begin, end - begin), most_ranks);
      break;
    }
    if (std::ranges::find(cps, cp) != cps.end()) {
      errors.add("--cp '{}': {} is there twice", text, cp);
      break;
    }
    cps.push_back(cp);
    begin = end + 1;
  }
  return cps;
}

/// The next multiple of kv_heads that tp divides, and so on: what to write instead.
void check_heads(const PredictOptions& o, ConfigErrors& errors) {
  if (o.heads % o.kv_heads != 0)
    errors.add("--heads {} is not a multiple of --kv-heads {}; the nearest is {}", o.heads,
               o.kv_heads, std::max(1, (o.heads + o.kv_heads / 2) / o.kv_heads) * o.kv_heads);
  if (o.kv_heads % o.tp != 0)
    errors.add("--tp {} does not divide --kv-heads {}; the nearest is {}", o.tp, o.kv_heads, [&] {
      int tp = std::min(o.tp, o.kv_heads);
      while (o.kv_heads % tp != 0) --tp;
      return tp;
    }());
}

}  // namespace

HeadShape PredictOptions::head_shape() const {
  return {heads / tp, kv_heads / tp, head_dim, 1 / std::sqrt(static_cast<float>(head_dim))};
}

MaskRule PredictOptions::mask_rule() const {
  return {mask == "full" ? MaskKind::full : MaskKind::causal, window};
}

ElementTypes PredictOptions::types() const {
  return {type_of(dtype), type_of(partial_out), type_of(partial_dq), type_of(wire_dkv)};
}

void declare_options(CLI::App& app, PredictOptions& o) {
  add_option(app,
             {"--machine", "The machine (gyre-machine/1 with a model): inputs/machines/", true},
             o.machine);
  add_option(app,
             {"--link", "Another rate of a tier of the machine, bytes/s: switch=25G; repeatable"},
             o.links);
  declare_sweep(app, "Tokens of each sequence, over all ranks", o.sweep);
  add_option(app, {"--gen", length_help()}, o.generate);
  add_size_option(app, {"--capacity", "With --gen: slots of the pack; 0: 16K"}, o.capacity);
  add_option(app, {"--batch", "Sequences of equal length"}, o.batch, 1);
  add_option(app, {"--heads", "Query heads"}, o.heads, 1);
  add_option(app, {"--kv-heads", "Key and value heads"}, o.kv_heads, 1);
  add_option(app, {"--head-dim", "Elements of a head"}, o.head_dim, 1);
  add_choice_option(app, {"--mask", "Inside a document"}, o.mask, {"causal", "full"});
  add_size_option(
      app, {"--window", "Causal: a query sees itself and the window - 1 before; 0: all"}, o.window);
  const std::vector<std::string> types = activation_type_names();
  add_choice_option(app, {"-d,--dtype", "Type of queries, keys and values"}, o.dtype, types);
  add_choice_option(app, {"--partial-out", "Type of the output between two merges"}, o.partial_out,
                    types);
  add_choice_option(app, {"--partial-dq", "Type of dQ between two steps"}, o.partial_dq, types);
  add_choice_option(app, {"--wire-dkv", "Type of dK and dV that travel (that of --dtype)"},
                    o.wire_dkv, types);
  add_option(app, {"--cp", "Context-parallel ranks: one number, or several, as 8,16,32"},
             o.cp_list);
  add_option(app, {"--tp", "Tensor-parallel ranks, which are neighbours and share the heads"}, o.tp,
             1);
  o.schedule.name = "all";
  schedule_choices().declare(app, o.schedule, "How keys and queries meet", true);
  layout_choices().declare(app, o.layout, "Who owns which slots", true);
  add_choice_option(app, {"--pass", "What is predicted"}, o.pass, {"fwd", "bwd", "both"});
  add_option(app, {"--svg", "Draw which schedule wins where, ranks by tokens, here"}, o.svg);
  add_option(app, {"--trace", "Write the timeline of one configuration here (for Perfetto)"},
             o.trace);
  declare_report_options(app, o.report);
}

void check_options(PredictOptions& o, int ranks) {
  ConfigErrors errors;
  if (ranks != 1)
    errors.add("a run of {} ranks: gyre-predict is one process; start it without mpirun", ranks);
  if (o.wire_dkv.empty()) o.wire_dkv = o.dtype;
  if (!o.generate.empty() && o.capacity == 0) o.capacity = 16384;
  if (o.capacity != 0 && o.generate.empty()) errors.add("--capacity goes with --gen");
  if (!o.generate.empty() && (o.sweep.sweeps() || o.batch != 1))
    errors.add("--min and --batch go with sequences, not with --gen");
  if (o.sweep.cycles > 1) errors.add("-N {}: a prediction is the same every time", o.sweep.cycles);
  check_sweep(o.sweep, PredictOptions().sweep.tokens, errors);
  const std::tuple<const char*, int, int> limits[] = {{"--heads", o.heads, 4096},
                                                      {"--kv-heads", o.kv_heads, 4096},
                                                      {"--head-dim", o.head_dim, 1024},
                                                      {"--batch", o.batch, 4096}};
  for (const auto& [option, value, most] : limits)
    if (value > most) errors.add("{} {}: at most {}", option, value, most);
  check_heads(o, errors);
  if (o.window > 0 && o.mask != "causal") errors.add("--window {} needs --mask causal", o.window);
  o.cps = parse_cps(o.cp_list, errors);
  schedule_choices().check(o.schedule, errors);
  layout_choices().check(o.layout, errors);
  const bool many = o.schedule.all() || o.layout.all() || o.cps.size() > 1 ||
                    (o.sweep.sweeps() && o.sweep.max != o.sweep.min);
  if (!o.trace.empty() && many)
    errors.add("--trace needs one --schedule, one --layout, one --cp and one size");
  if (!o.svg.empty() && o.pass != "both") errors.add("--svg compares both passes: --pass both");
  if (o.report.resume != "none") errors.add("--resume: nothing is measured; leave it out");
  errors.throw_if_any("impossible configuration");
  check_output_places(
      {{"--svg", o.svg}, {"--trace", o.trace}, {"--json", o.report.json}, {"--csv", o.report.csv}},
      {{"--machine", o.machine}});
}

}  // namespace gyre
