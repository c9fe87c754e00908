#include "apps/attention/options.hpp"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "apps/attention/setup.hpp"
#include "apps/common/network_options.hpp"
#include "apps/common/replay_options.hpp"
#include "attention/kernels/cuda_kernel.hpp"
#include "attention/kernels/emulated.hpp"
#include "attention/kernels/make_kernel.hpp"
#include "core/error.hpp"
#include "packing/lengths.hpp"
#include "runtime/features.hpp"
#include "supervision/output_guard.hpp"

namespace gyre {
namespace {

constexpr int64_t max_tokens = int64_t{1} << 30;

void declare_problem(OptionTable& table, AttentionOptions& o) {
  const AddOptions add(table, "Problem");
  add("--input", "Queries, keys, values and references (HDF5, gyre/attention)", o.input)
      .reads_file()
      .problem_file();
  declare_generated(table, o.generate);
  add.size("--capacity", "With --gen: slots of the bin that documents are packed into; 0: 16K",
           o.capacity, 0, max_tokens);
  declare_sweep(table, "Tokens of each sequence, over all ranks", o.sweep, max_tokens);
  add("--batch", "Number of sequences, which have equal lengths", o.batch, 1);
  add("--heads", "Query heads", o.heads, 1, max_heads).in_problem_file();
  add("--kv-heads", "Key and value heads", o.kv_heads, 1, max_heads).in_problem_file();
  add("--head-dim", "Elements of a head of queries and keys", o.head_dim, 1, max_head_dim)
      .in_problem_file();
  declare_head_widths(table, o.v_head_dim, o.shared_key_dim);
  declare_mask_options(table, o.mask);
  add.flag("--sinks", "Learnable sinks, one a query head", o.sinks).in_problem_file();
  add.seed("Seed of random inputs", o.seed).in_problem_file();
}

void declare_types(OptionTable& table, AttentionOptions& o) {
  const AddOptions add(table, "Advanced");
  const std::vector<std::string> types = activation_type_names();
  AddOptions(table, "Problem")
      .choice("-d,--dtype", "Type of queries, keys and values", o.dtype, types);
  add.choice("--partial-out", "Type of the output between two merges", o.partial_out, types);
  add.choice("--partial-dq", "Type of dQ between two steps", o.partial_dq, types);
  add.choice("--wire-dkv", "Type in which dK and dV travel; default: that of --dtype", o.wire_dkv,
             types);
}

void declare_schedule(OptionTable& table, AttentionOptions& o) {
  const AddOptions add(table, "Parallelism");
  add("--cp", "Context-parallel ranks: those of the run (0), or any with --explain or --replay",
      o.cp, 0, max_ranks);
  declare_replay(table, o.replay);
  add.flag(
      "--auto",
      "Run only the schedule and layout that the model of --machine predicts to be the fastest; "
      "--schedule and --layout choose among which, unless given: all",
      o.automatic);
  schedule_choices().declare(table, o.schedule, "How keys and queries meet", true);
  layout_choices().declare(table, o.layout, "Who owns which slots", true);
  declare_backend_options(table, o.backend);
  const AddOptions advanced(table, "Advanced");
  advanced.choice(
      "--kernel",
      "GPUs: tiled, cudnn (with tiled for what it refuses), or auto: cudnn for bf16 where "
      "it is built in, else tiled",
      o.kernel, kernel_choices());
  advanced.flag(
      "--deterministic",
      "Get the same bits in every run at any cost: sums that cudnn adds in no fixed order go to "
      "the tiled kernel (all other kernels have a fixed order)",
      o.deterministic);
  advanced.flag(
      "--cuda-graph",
      "GPUs: record the steps of a pass once, and launch them as one CUDA graph from then on. "
      "Needs --comm nccl, and makes at least 2 iterations of --warmup",
      o.cuda_graph);
  add("--threads", "Threads of a rank's kernel on CPUs", o.threads, 1, max_threads);
}

void declare_measurement(OptionTable& table, AttentionOptions& o) {
  const AddOptions add(table, "Measurement");
  add.choice("--pass", "Passes that are timed", o.pass, {"fwd", "bwd", "both"}).in_key();
  declare_repeats(table, "Timed iterations", o.repeats);
  add("-w,--warmup", "Untimed iterations before the timed ones", o.warmup, 0);
  add.choice("-c,--check",
             "Verify the last iteration, every one, or nothing; default: last, or none with "
             "--emulate-compute",
             o.check, {"none", "last", "all"});
  add.size("--check-pairs",
           "Pairs of a query head and a key that a check computes again on all ranks",
           o.check_pairs, 1);
  add("--tol-scale", "Factor of all tolerances", o.tol_scale, positive);
  const AddOptions advanced(table, "Advanced"), plan(table, "Plan"), output(table, "Output");
  declare_network(table, o.network);
  advanced("--emulate-compute",
           "Sleep as long as a kernel of this rate would compute: tflops=0.1[,launch=10us], or the "
           "kernel of this machine (gyre-machine/1)",
           o.compute)
      .names_file([](const std::string& text) { return names_machine(text) ? text : ""; })
      .called("compute")
      .empty_is("real");
  output("--trace", "Write a timeline of one more iteration here, for Perfetto", o.trace)
      .writes_text();
  plan.flag("--explain", "Show the plan and what it costs, and stop", o.explain).same_results();
  plan("--svg", "With --explain: draw the plan into this file (SVG)", o.svg).writes_text();
  plan("--tflops", "With --explain: rate of attention on a rank, TFLOP/s", o.tflops, positive)
      .same_results();
  plan("--gbps", "With --explain: rate at which a rank sends, GB/s", o.gbytes_per_s, positive)
      .same_results();
  plan("--latency-us", "With --explain: latency of a message, µs", o.latency_us, not_negative)
      .same_results();
  output("-o,--output", "Write out, lse and gradients of one configuration here (HDF5)", o.output)
      .writes_file();
  declare_report_options(table, o.report, {"attention_rate", "average_attention_rate"});
}

void check_source(const AttentionOptions& o, ConfigErrors& errors) {
  const AttentionOptions usual;
  if (!o.input.empty() && !o.generate.empty()) errors.add("one of --input and --gen, not both");
  const bool has_length = o.sweep.sweeps() || o.batch != 1 || o.sweep.tokens != usual.sweep.tokens;
  if ((!o.input.empty() || !o.generate.empty()) && has_length)
    errors.add("--tokens, --min and --batch go with sequences, not with --input or --gen");
  if (o.capacity != 0 && o.generate.empty()) errors.add("--capacity goes with --gen");
}

void check_sizes(const AttentionOptions& o, ConfigErrors& errors) {
  check_sweep(o.sweep, AttentionOptions().sweep.tokens, errors);
  const std::pair<const char*, int64_t> sizes[] = {{"--tokens", o.sweep.tokens},
                                                   {"--min", o.sweep.min},
                                                   {"--max", o.sweep.max},
                                                   {"--capacity", o.capacity}};
  for (const auto& [option, size] : sizes)
    if (size > max_tokens / o.batch)
      errors.add("{} {} times --batch {}: at most {} tokens, {} {}", option, size, o.batch,
                 max_tokens, option, max_tokens / o.batch);
}

void check_shape(const AttentionOptions& o, ConfigErrors& errors) {
  check_head_groups(o.heads, "--kv-heads", o.kv_heads, errors);
  check_shared_keys(o.shared_key_dim, o.head_dim, errors);
  check_mask_options(o.mask, errors);
}

bool has_many(const AttentionOptions& o) {
  return o.schedule.several() || o.layout.several() || o.sweep.cycles > 1 ||
         (o.sweep.sweeps() && o.sweep.max != o.sweep.min);
}

void check_explanation(const AttentionOptions& o, ConfigErrors& errors) {
  const AttentionOptions usual;
  const bool has_model = o.tflops != usual.tflops || o.gbytes_per_s != usual.gbytes_per_s ||
                         o.latency_us != usual.latency_us;
  if (!o.explain && (!o.svg.empty() || has_model))
    errors.add("--svg, --tflops, --gbps and --latency-us go with --explain");
  if (!o.explain) return;
  if (o.sweep.sweeps() && o.sweep.max != o.sweep.min) errors.add("--explain needs one size");
  if (!o.svg.empty() && has_many(o)) errors.add("--svg needs one --schedule and one --layout");
  for (const auto& [option, value] : {std::pair{"--output", o.output},
                                      {"--trace", o.trace},
                                      {"--emulate-network", o.network},
                                      {"--emulate-compute", o.compute}})
    if (!value.empty()) errors.add("{} goes with a run, not with --explain", option);
}

void check_backend(const AttentionOptions& o, ConfigErrors& errors) {
  if (!o.network.empty() && o.schedule.options.collectives != 0)
    errors.add(
        "--emulate-network delays messages, and no operations of a library: --collectives "
        "messages, or without it");
  if (!o.backend.on_gpu()) {
    if (o.cuda_graph)
      errors.add("--cuda-graph records the work of a GPU: --backend cuda, or without it");
    if (o.kernel != "auto")
      errors.add("--kernel {} is one of GPUs: --backend cuda, or --kernel auto", o.kernel);
    return;
  }
  if (o.explain) errors.add("--backend cuda goes with a run, not with --explain");
  if (o.threads != 1)
    errors.add("--threads {} are of a CPU's kernel; with --backend cuda: 1", o.threads);
  constexpr int64_t largest_head_dim = cuda_kernel_largest_head_dim;
  for (const auto& [option, value] :
       {std::pair{"--head-dim", o.head_dim}, {"--v-head-dim", o.v_head_dim}})
    if (value > largest_head_dim)
      errors.add("{} {}: with --backend cuda at most {}", option, value, largest_head_dim);
  if (o.kernel == "cudnn" && !with_cudnn)
    errors.add("--kernel cudnn: this build has no cuDNN; --kernel tiled works");
}

void check_parsed(const std::string& value, void (*parse)(std::string_view), ConfigErrors& errors) {
  if (value.empty()) return;
  try {
    parse(value);
  } catch (const Error& error) {
    errors.add("{}", error.what());
  }
}

void check_emulation(const AttentionOptions& o, ConfigErrors& errors) {
  check_network(o.network, o.backend, errors);
  if (!o.emulates_compute()) return;
  if (!names_machine(o.compute))
    check_parsed(
        o.compute, [](std::string_view text) { parse_kernel_time(text); }, errors);
  if (o.check != "none")
    errors.add("--check {}: with --emulate-compute there are no results to check; --check none",
               o.check);
  if (!o.output.empty())
    errors.add("--output: with --emulate-compute there are no results to write");
  if (o.backend.on_gpu())
    errors.add("--emulate-compute sleeps on CPUs: --backend cpu, or without it");
  if (o.threads != 1)
    errors.add("--threads {}: with --emulate-compute a rank's kernel has one, which sleeps",
               o.threads);
}

void check_replay(const AttentionOptions& o, int ranks, ConfigErrors& errors) {
  if (!o.replay) return;
  check_replay({ranks, o.cp, o.threads, o.explain, o.backend.on_gpu()}, o.report, errors);
  for (const auto& [option, value] : {std::pair{"--trace", o.trace},
                                      {"--emulate-network", o.network},
                                      {"--emulate-compute", o.compute}})
    if (!value.empty()) refuse_in_replay(option, errors);
}

void check_run(const AttentionOptions& o, int ranks, ConfigErrors& errors) {
  if (!o.explain && !o.replay && o.cp != ranks)
    errors.add("--cp {} in a run of {} ranks; --explain and --replay take any", o.cp, ranks);
  for (const auto& [option, file] : {std::pair{"--output", o.output}, {"--trace", o.trace}})
    if (!file.empty() && has_many(o))
      errors.add("{} needs one --schedule, one --layout and one size", option);
  if (o.report.resume != "none" && (!o.output.empty() || !o.trace.empty()))
    errors.add(
        "--resume leaves rows out; --output and --trace need theirs: run them by themselves");
  if (o.automatic && o.explain) errors.add("--auto chooses what runs, and --explain runs nothing");
  if (!o.output.empty() && o.pass == "fwd")
    errors.add("--output writes gradients too: --pass both");
}

}  // namespace

HeadShape AttentionOptions::head_shape() const {
  return {.heads = heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .scale = 1 / std::sqrt(static_cast<float>(head_dim)),
          .v_head_dim = v_head_dim,
          .shared_key_dim = shared_key_dim};
}

ElementTypes AttentionOptions::types() const {
  return {activation_type(dtype), activation_type(partial_out), activation_type(partial_dq),
          activation_type(wire_dkv)};
}

std::vector<Pass> AttentionOptions::passes() const {
  if (pass == "fwd") return {Pass::forward};
  if (pass == "bwd") return {Pass::backward};
  return {Pass::forward, Pass::backward};
}

void declare_options(OptionTable& table, AttentionOptions& o) {
  declare_problem(table, o);
  declare_types(table, o);
  declare_schedule(table, o);
  declare_measurement(table, o);
}

void check_options(AttentionOptions& o, int ranks) {
  if (o.cp == 0) o.cp = ranks;
  if (o.wire_dkv.empty()) o.wire_dkv = o.dtype;
  if (o.automatic && o.schedule.name == ScheduleChoice().name) o.schedule.name = "all";
  if (o.automatic && o.layout.name == LayoutChoice().name) o.layout.name = "all";
  if (o.check.empty()) o.check = o.emulates_compute() ? "none" : "last";
  if (!o.generate.empty() && o.capacity == 0) o.capacity = 16384;
  ConfigErrors errors;
  check_source(o, errors);
  check_sizes(o, errors);
  check_shape(o, errors);
  schedule_choices().check(o.schedule, errors);
  layout_choices().check(o.layout, errors);
  check_explanation(o, errors);
  check_backend(o, errors);
  check_replay(o, ranks, errors);
  check_run(o, ranks, errors);
  check_emulation(o, errors);
  errors.throw_if_any("impossible configuration");
}

}  // namespace gyre
