#include "apps/predict/options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "io/brought_file.hpp"
#include "io/schemas/recurrence_file.hpp"
#include "sharding/layouts.hpp"
#include "supervision/output_guard.hpp"

namespace gyre {
namespace {

constexpr int max_seeds = 10000;

/// Checks that tensor-parallel ranks can share heads; errors name the nearest valid value.
void check_shares(int tp, const char* option, int heads, ConfigErrors& errors) {
  if (heads % tp == 0) return;
  int nearest = std::min(tp, heads);
  while (heads % nearest != 0) --nearest;
  errors.add("--tp {} does not divide {} {}; the nearest is {}", tp, option, heads, nearest);
}

/// Checks the numbers of heads of attention.
void check_heads(const PredictOptions& o, ConfigErrors& errors) {
  check_head_groups(o.heads, "--kv-heads", o.kv_heads, errors);
  check_shared_keys(o.shared_key_dim, o.head_dim, errors);
  check_shares(o.tp, "--kv-heads", o.kv_heads, errors);
}

/// Checks the options that choose the documents.
void check_documents(PredictOptions& o, ConfigErrors& errors) {
  const bool packed = !o.generate.empty() || !o.input.empty();
  if (!o.generate.empty() && !o.input.empty())
    errors.add("--gen and --input are two sets of documents; give one");
  if (!o.input.empty() && o.model.empty()) errors.add("--input goes with --model");
  check_prefix_options(o.prefixes, errors);
  if (o.prefixes.share && o.input.empty()) errors.add("--share-prefixes needs --input");
  if (o.capacity != 0 && !packed) errors.add("--capacity goes with --gen or --input");
  if (packed && (o.sweep.sweeps() || o.batch != 1))
    errors.add("--min and --batch go with sequences, not with --gen or --input");
  if (packed && o.capacity == 0) o.capacity = 16384;
  if (o.seeds == 1) return;
  if (o.generate.empty() || !o.model.empty())
    errors.add("--seeds {} goes with --gen, without --model", o.seeds);
  for (const auto& [option, path] : o.of_one_configuration())
    if (!path->empty()) errors.add("{} shows one draw of documents; leave out --seeds", option);
}

/// Checks the options of one attention.
void check_attention(PredictOptions& o, ConfigErrors& errors) {
  if (o.pass.empty()) o.pass = "both";
  if (o.dp != 1) errors.add("--dp {} goes with --model", o.dp);
  for (auto [value, usual] : {std::pair{&o.heads, 32}, {&o.kv_heads, 8}, {&o.head_dim, 128}})
    if (*value == 0) *value = usual;
}

/// Checks that the options of masks and of types between steps are unchanged.
void check_plain(const PredictOptions& o, const char* why_mask, const char* why_types,
                 ConfigErrors& errors) {
  if (!(o.mask == MaskOptions())) errors.add("--mask, --window, --queries: {}", why_mask);
  const PredictOptions usual;
  if (o.partial_out != usual.partial_out || o.partial_dq != usual.partial_dq ||
      o.wire_dkv != o.dtype)
    errors.add("--partial-out, --partial-dq, --wire-dkv: {}", why_types);
}

/// Checks the options of one recurrent layer.
void check_recurrence(PredictOptions& o, ConfigErrors& errors) {
  if (o.pass.empty()) o.pass = "both";
  if (!o.model.empty()) errors.add("--recurrence and --model are two problems; give one");
  if (o.dp != 1) errors.add("--dp {} goes with --model", o.dp);
  constexpr const char* why = "a recurrence has none; leave it out";
  check_plain(o, why, why, errors);
  for (const auto& [option, value] :
       {std::pair{"--kv-heads", o.kv_heads}, {"--shared-key-dim", o.shared_key_dim}})
    if (value != 0) errors.add("{} {}: {}", option, value, why);
  if (o.schedule.name != "all") errors.add("--schedule {}: {}", o.schedule.name, why);
  for (const auto& [option, path] : o.of_one_configuration())
    if (!path->empty()) errors.add("{} shows attention; leave out --recurrence", option);
  for (auto [value, usual] : {std::pair{&o.heads, 32}, {&o.key_heads, 16}, {&o.head_dim, 128}})
    if (*value == 0) *value = usual;
  if (o.v_head_dim == 0) o.v_head_dim = o.head_dim;
  check_head_groups(o.heads, "--key-heads", o.key_heads, errors);
  check_shares(o.tp, "--key-heads", o.key_heads, errors);
}

/// Checks the options of a scoring pass, whose attention the model defines.
void check_model(PredictOptions& o, ConfigErrors& errors) {
  if (o.pass.empty()) o.pass = "fwd";
  if (o.pass != "fwd") errors.add("--pass {}: a scoring pass has no backward", o.pass);
  for (const auto& [option, value] : {std::pair{"--heads", o.heads},
                                      {"--kv-heads", o.kv_heads},
                                      {"--head-dim", o.head_dim},
                                      {"--v-head-dim", o.v_head_dim},
                                      {"--shared-key-dim", o.shared_key_dim}})
    if (value != 0) errors.add("{} {}: the heads are the model's", option, value);
  check_plain(o, "a scoring pass has causal attention", "a scoring pass chooses them by --dtype",
              errors);
  if (!o.svg.empty()) errors.add("--svg shows one attention; leave out --model");
  for (const auto& [option, path] : o.of_one_configuration())
    if (!path->empty()) errors.add("{} shows one attention; leave out --model", option);
}

void declare_recurrence(OptionTable& table, PredictOptions& o) {
  const AddOptions add(table, "Problem"), ranks(table, "Parallelism");
  add.choice("--recurrence", "Predict a recurrent layer of this kind instead of attention",
             o.recurrence, names_of(recurrence_kinds()));
  add("--key-heads", "With --recurrence: heads of queries and keys; 0: 16", o.key_heads, 0,
      max_heads);
  add("--conv", "With --recurrence: tokens that the convolution before the layer reads; 0: none",
      o.conv, 0, max_convolution);
  ranks
      .choices("--state-schedule",
               "With --recurrence, or a model with recurrent layers: how states pass from rank to "
               "rank",
               o.state_schedule, described(state_schedules()))
      .in_key();
  ranks
      .choices("--recurrent-layout", "With a model that has recurrent layers: their layout",
               o.recurrent_layout, described(layout_kinds()))
      .in_key();
}

}  // namespace

HeadShape PredictOptions::head_shape() const {
  return {.heads = heads / tp,
          .kv_heads = kv_heads / tp,
          .head_dim = head_dim,
          .scale = 1 / std::sqrt(static_cast<float>(head_dim)),
          .v_head_dim = v_head_dim,
          .shared_key_dim = shared_key_dim};
}

ElementTypes PredictOptions::types() const {
  return {activation_type(dtype), activation_type(partial_out), activation_type(partial_dq),
          activation_type(wire_dkv)};
}

RecurrenceShape PredictOptions::recurrence_shape() const {
  const auto kind = std::ranges::find(recurrence_kinds(), recurrence, &RecurrenceKind::name);
  RecurrenceShape shape(*kind, key_heads / tp, heads / tp, head_dim, v_head_dim);
  shape.convolution = conv;
  return shape;
}

void declare_options(OptionTable& table, PredictOptions& o) {
  const AddOptions add(table, "Problem"), ranks(table, "Parallelism"), advanced(table, "Advanced"),
      output(table, "Output");
  add.required("--machine", "The machine (gyre-machine/1 with a model): a file, or h100-sxm-8 etc.",
               o.machine)
      .reads_file();
  add("--link", "Another rate of a tier of the machine, bytes/s: switch=25G; repeatable", o.links)
      .called("links");
  declare_sweep(table, "Tokens of each sequence, over all ranks", o.sweep);
  declare_generated(table, o.generate);
  add("--seeds",
      "With --gen: predict the documents of so many seeds, from seed= on. Figures are their means",
      o.seeds, 1, max_seeds)
      .show(Shown::when_given);
  add.size("--capacity", "With --gen or --input: slots of a bin; 0: 16K", o.capacity);
  add("--model",
      "A scoring pass of this model instead of one attention: gyre/model, a config.json, or "
      "llama-3.1-8b etc.",
      o.model)
      .reads_file();
  add("--input", "With --model: documents (HDF5, gyre/documents)", o.input).reads_file();
  declare_prefix_options(table, o.prefixes);
  add("--batch", "Number of sequences, which have equal lengths", o.batch, 1, max_heads);
  add("--heads", "Query heads, or a recurrence's heads of values; 0: those of the model, or 32",
      o.heads, 0, max_heads);
  add("--kv-heads", "Key and value heads; 0: those of the model, or 8", o.kv_heads, 0, max_heads);
  add("--head-dim", "Elements of a head of queries and keys; 0: those of the model, or 128",
      o.head_dim, 0, max_head_dim);
  declare_head_widths(table, o.v_head_dim, o.shared_key_dim);
  declare_mask_options(table, o.mask);
  const std::vector<std::string> types = activation_type_names();
  add.choice("-d,--dtype", "Type of queries, keys and values", o.dtype, types);
  advanced.choice("--partial-out", "Type of the output between two merges", o.partial_out, types);
  advanced.choice("--partial-dq", "Type of dQ between two steps", o.partial_dq, types);
  advanced.choice("--wire-dkv", "Type in which dK and dV travel; default: that of --dtype",
                  o.wire_dkv, types);
  ranks("--cp", "Context-parallel ranks: one number, or several, as 8,16,32", o.cp_list).in_key();
  ranks("--tp", "Tensor-parallel ranks, which are neighbours and share the heads", o.tp, 1,
        max_ranks);
  ranks("--dp", "With --model: data-parallel replicas", o.dp, 1, max_ranks);
  o.schedule.name = "all";
  schedule_choices().declare(table, o.schedule, "How keys and queries meet", true);
  declare_recurrence(table, o);
  layout_choices().declare(table, o.layout, "Who owns which slots", true);
  add.choice("--pass", "Passes that are predicted; default: both, or fwd of a model", o.pass,
             {"fwd", "bwd", "both"})
      .in_key();
  output("--svg", "Draw which schedule wins at which ranks and tokens into this file (SVG)", o.svg)
      .writes_text();
  output("--trace", "Write the timeline of one configuration here, for Perfetto", o.trace)
      .writes_text();
  output("--goal",
         "Write messages and computations of one configuration here, as a GOAL schedule for "
         "LogGOPSim",
         o.goal)
      .writes_text();
  output("--chakra",
         "The same as Chakra execution traces for ASTRA-sim: PREFIX.RANK.et of each rank", o.chakra)
      .writes_text();
  declare_report_options(table, o.report, {});  // metrics_of() knows the figures
}

std::vector<std::string> metrics_of(const PredictOptions& o) {
  return {o.model.empty() ? "predicted_tflops_per_rank" : "predicted_tokens_per_s"};
}

void check_options(PredictOptions& o, int ranks) {
  ConfigErrors errors;
  if (ranks != 1)
    errors.add("a run of {} ranks: gyre-predict is one process; start it without mpirun", ranks);
  o.machine = find_brought_file("--machine", o.machine, "machines", errors);
  o.model = find_brought_file("--model", o.model, "models", errors);
  if (o.wire_dkv.empty()) o.wire_dkv = o.dtype;
  check_documents(o, errors);
  if (!o.recurrence.empty())
    check_recurrence(o, errors);
  else if (o.model.empty())
    check_attention(o, errors);
  else
    check_model(o, errors);
  const PredictOptions usual;
  if (o.recurrence.empty() && (o.key_heads != 0 || o.conv != 0))
    errors.add("--key-heads and --conv go with --recurrence");
  if (o.recurrence.empty() && o.model.empty() && o.state_schedule != usual.state_schedule)
    errors.add("--state-schedule goes with --recurrence, or --model");
  if (o.model.empty() && o.recurrent_layout != usual.recurrent_layout)
    errors.add("--recurrent-layout goes with --model");
  if (o.sweep.cycles > 1) errors.add("-N {}: a prediction is the same every time", o.sweep.cycles);
  check_sweep(o.sweep, PredictOptions().sweep.tokens, errors);
  if (o.model.empty() && o.recurrence.empty()) check_heads(o, errors);
  check_mask_options(o.mask, errors);
  o.cps = parse_numbers("--cp", o.cp_list, {"ranks", 1, max_ranks, "8,16,32"}, errors);
  constexpr int64_t max_grid_ranks = int64_t{1} << 24;
  for (const int cp : o.cps)
    if (const int64_t ranks_of_grid = int64_t{o.dp} * cp * o.tp; ranks_of_grid > max_grid_ranks)
      errors.add("--dp {} --cp {} --tp {} are {} ranks; at most {}", o.dp, cp, o.tp, ranks_of_grid,
                 max_grid_ranks);
  schedule_choices().check(o.schedule, errors);
  layout_choices().check(o.layout, errors);
  const bool many =
      o.has_several() || o.cps.size() > 1 || (o.sweep.sweeps() && o.sweep.max != o.sweep.min);
  for (const auto& [option, path] : o.of_one_configuration())
    if (!path->empty() && many)
      errors.add("{} needs one --schedule, one --layout, one --cp and one size", option);
  if (!o.svg.empty() && o.pass != "both") errors.add("--svg compares both passes: --pass both");
  if (o.report.resume != "none") errors.add("--resume: nothing is measured; leave it out");
  errors.throw_if_any("impossible configuration");
}

}  // namespace gyre
