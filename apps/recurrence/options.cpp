#include "apps/recurrence/options.hpp"

#include <algorithm>

#include "apps/common/network_options.hpp"
#include "apps/common/replay_options.hpp"
#include "apps/common/workload_options.hpp"
#include "core/error.hpp"
#include "io/schemas/recurrence_file.hpp"
#include "recurrence/device_scratch.hpp"

namespace gyre {
namespace {

constexpr int64_t max_tokens = int64_t{1} << 30;

void declare_problem(OptionTable& table, RecurrenceOptions& o) {
  const AddOptions add(table, "Problem");
  add("--input", "Inputs and references (HDF5, gyre/recurrence)", o.input)
      .reads_file()
      .problem_file();
  declare_generated(table, o.generate);
  add.size("--capacity", "With --gen: slots of the bin that documents are packed into; 0: 16K",
           o.capacity, 0, max_tokens);
  declare_sweep(table, "Tokens of each sequence, over all ranks", o.sweep, max_tokens);
  add("--batch", "Number of sequences, which have equal lengths", o.batch, 1);
  add.choices("--kind", "What the state of a head does with a token", o.kind,
              described(recurrence_kinds()))
      .in_key()
      .in_problem_file();
  add("--heads", "Heads of values, each with a state", o.heads, 1, max_heads).in_problem_file();
  add("--key-heads", "Heads of queries and keys", o.key_heads, 1, max_heads).in_problem_file();
  add("--key-dim", "Elements of a head of queries and keys: rows of a state", o.key_dim, 1,
      max_head_dim)
      .in_problem_file();
  add("--value-dim", "Elements of a head of values: columns of a state", o.value_dim, 1,
      max_head_dim)
      .in_problem_file();
  add("--conv",
      "Tokens that a causal convolution of queries, keys and values reads, before the recurrence; "
      "0: there is none",
      o.conv, 0, max_convolution)
      .in_problem_file();
  add.choice("-d,--dtype", "Type of queries, keys, values and the output", o.dtype,
             activation_type_names());
  add.seed("Seed of random inputs", o.seed).in_problem_file();
}

void declare_run(OptionTable& table, RecurrenceOptions& o) {
  const AddOptions add(table, "Parallelism");
  add("--cp", "Context-parallel ranks: those of the run (0), or any with --explain or --replay",
      o.cp, 0, max_ranks);
  declare_replay(table, o.replay);
  add.choices("--schedule", "How states pass from rank to rank", o.schedule,
              described(state_schedules()))
      .in_key();
  layout_choices().declare(table, o.layout, "Who owns which slots", true);
  declare_backend_options(table, o.backend);
  declare_network(table, o.network);
  AddOptions(table, "Advanced")("--threads", "Threads of a rank's kernel", o.threads, 1,
                                max_threads);
  const AddOptions measurement(table, "Measurement"), plan(table, "Plan");
  measurement.choice("--pass", "Passes that are timed", o.pass, {"fwd", "bwd", "both"}).in_key();
  declare_repeats(table, "Timed iterations", o.repeats);
  measurement("-w,--warmup", "Untimed iterations before the timed ones", o.warmup, 0);
  measurement.choice("-c,--check", "Verify the last iteration, every one, or nothing", o.check,
                     {"none", "last", "all"});
  measurement.size("--check-tokens",
                   "Tokens times heads of values that a check computes again; at least those of "
                   "one head of keys",
                   o.check_tokens, 1);
  measurement("--tol-scale", "Factor of all tolerances", o.tol_scale, positive);
  plan.flag("--explain", "Show the plan and what it costs, and stop", o.explain).same_results();
  plan("--tflops", "With --explain: rate of a rank, TFLOP/s", o.tflops, positive).same_results();
  plan("--gbps", "With --explain: rate at which a rank sends, GB/s", o.gbytes_per_s, positive)
      .same_results();
  plan("--latency-us", "With --explain: latency of a message, µs", o.latency_us, not_negative)
      .same_results();
  AddOptions(table, "Output")("-o,--output",
                              "Write out and gradients of one configuration here (HDF5)", o.output)
      .writes_file();
  declare_report_options(table, o.report, {"recurrence_rate", "average_recurrence_rate"});
}

void check_source(const RecurrenceOptions& o, ConfigErrors& errors) {
  const RecurrenceOptions usual;
  if (!o.input.empty() && !o.generate.empty()) errors.add("one of --input and --gen, not both");
  const bool has_length = o.sweep.sweeps() || o.batch != 1 || o.sweep.tokens != usual.sweep.tokens;
  if ((!o.input.empty() || !o.generate.empty()) && has_length)
    errors.add("--tokens, --min and --batch go with sequences, not with --input or --gen");
  if (o.capacity != 0 && o.generate.empty()) errors.add("--capacity goes with --gen");
  check_head_groups(o.heads, "--key-heads", o.key_heads, errors);
  check_sweep(o.sweep, usual.sweep.tokens, errors);
  for (const auto& [option, size] : {std::pair<const char*, int64_t>{"--tokens", o.sweep.tokens},
                                     {"--min", o.sweep.min},
                                     {"--max", o.sweep.max}})
    if (size > max_tokens / o.batch)
      errors.add("{} {} times --batch {}: at most {} tokens, {} {}", option, size, o.batch,
                 max_tokens, option, max_tokens / o.batch);
}

void check_output(const RecurrenceOptions& o, ConfigErrors& errors) {
  if (o.output.empty()) return;
  if (o.explain) errors.add("--output goes with a run, not with --explain");
  if (o.has_many() || o.sweep.cycles > 1 || (o.sweep.sweeps() && o.sweep.max != o.sweep.min))
    errors.add("--output needs one --kind, one --schedule, one --layout and one size");
  if (o.pass == "fwd") errors.add("--output writes gradients too: --pass both");
  if (o.report.resume != "none")
    errors.add("--resume leaves rows out; --output needs its own: run it by itself");
}

void check_gpu(const RecurrenceOptions& o, ConfigErrors& errors) {
  if (o.explain) errors.add("--backend cuda goes with a run, not with --explain");
  if (o.threads != 1)
    errors.add("--threads {} are of a CPU's kernel; with --backend cuda: 1", o.threads);
  if (o.key_dim > cuda_recurrence_largest_key_dim)
    errors.add("--key-dim {}: with --backend cuda at most {}", o.key_dim,
               cuda_recurrence_largest_key_dim);
}

void check_run(const RecurrenceOptions& o, int ranks, ConfigErrors& errors) {
  const RecurrenceOptions usual;
  if (o.backend.on_gpu()) check_gpu(o, errors);
  check_network(o.network, o.backend, errors);
  if (!o.network.empty() && o.explain)
    errors.add("--emulate-network goes with a run, not with --explain");
  if (!o.network.empty() && o.replay) refuse_in_replay("--emulate-network", errors);
  if (o.replay)
    check_replay({ranks, o.cp, o.threads, o.explain, o.backend.on_gpu()}, o.report, errors);
  else if (!o.explain && o.cp != ranks)
    errors.add("--cp {} in a run of {} ranks; --explain and --replay take any", o.cp, ranks);
  const bool has_model = o.tflops != usual.tflops || o.gbytes_per_s != usual.gbytes_per_s ||
                         o.latency_us != usual.latency_us;
  if (!o.explain && has_model) errors.add("--tflops, --gbps and --latency-us go with --explain");
  if (o.explain && o.sweep.sweeps() && o.sweep.max != o.sweep.min)
    errors.add("--explain needs one size");
}

}  // namespace

RecurrenceOptions::RecurrenceOptions()
    : kind(recurrence_kinds().front().name), schedule(state_schedules().front().name) {
  layout.name = layout_kinds().front().name;  // one part of a document on a rank
}

DType RecurrenceOptions::type() const {
  return activation_type(dtype);
}

MachineModel RecurrenceOptions::machine() const {
  MachineModel machine = flat_machine(1e12 * tflops, 1e9 * gbytes_per_s, 1e-6 * latency_us);
  for (const RecurrenceKind& entry : recurrence_kinds())
    for (const Pass one : {Pass::forward, Pass::backward})
      machine.recurrence.rates.push_back({entry.name, one, type(), 0, 0, 1e12 * tflops});
  return machine;
}

std::vector<Pass> RecurrenceOptions::passes() const {
  if (pass == "fwd") return {Pass::forward};
  if (pass == "bwd") return {Pass::backward};
  return {Pass::forward, Pass::backward};
}

bool RecurrenceOptions::has_many() const {
  return lists_several(kind) || lists_several(schedule) || layout.several();
}

void declare_options(OptionTable& table, RecurrenceOptions& o) {
  declare_problem(table, o);
  declare_run(table, o);
}

void check_options(RecurrenceOptions& o, int ranks) {
  if (o.cp == 0) o.cp = ranks;
  if (!o.generate.empty() && o.capacity == 0) o.capacity = 16384;
  ConfigErrors errors;
  check_source(o, errors);
  layout_choices().check(o.layout, errors);
  check_run(o, ranks, errors);
  check_output(o, errors);
  errors.throw_if_any("impossible configuration");
}

}  // namespace gyre
