// gyre-attention: context-parallel attention, forward and backward. Every schedule under every
// layout is timed, counted and verified.

#include <fmt/format.h>

#include <optional>

#include "apps/attention/check.hpp"
#include "apps/attention/emulation.hpp"
#include "apps/attention/explain.hpp"
#include "apps/attention/report.hpp"
#include "apps/attention/results.hpp"
#include "apps/attention/setup.hpp"
#include "comm/agree.hpp"
#include "io/sha256.hpp"
#include "report/app.hpp"
#include "report/provenance.hpp"
#include "report/trace_file.hpp"
#include "runtime/peak.hpp"

namespace {

using namespace gyre;

/// State that all configurations of a run share.
struct Suite {
  const AttentionOptions& o;
  const std::optional<AttentionFile>& file;
  AppContext& context;
  AttentionMachine machine;
  RunReport& report;
  bool on_gpu;
  double peak_flops;  ///< of a rank; 0: unknown
  int64_t memory_bytes;
  const AttentionReference* reference;  ///< null: expected values are recomputed
  Table<AttentionResult> table;         ///< the columns that are shown
  int cycle = 1;
  std::vector<AttentionResult> results = {};
  std::vector<std::string> refused = {};
};

/// Times and verifies one direction.
AttentionResult do_pass(Suite& s, AttentionRun& run, const TensorRows& inputs, Pass pass) {
  const AttentionOptions& o = s.o;
  Communicator& world = s.context.world;
  Verification checks(o.tol_scale);
  const auto check = [&] {
    look_at_results(pass, run, inputs, s.reference, o.check_pairs, world, checks);
  };
  AttentionResult result =
      run.measure(pass, {o.repeats, o.warmup, s.peak_flops, o.emulates_compute()}, world,
                  o.check == "all" ? check : std::function<void()>{});
  if (o.check != "none") {
    // What was timed, where it cannot be compared with the next run bit by bit.
    if (o.check == "last" && s.on_gpu) check();
    run_verified(pass, run, inputs, s.reference, o.check_pairs, world, checks);
    result.check = check_text(s.report, checks);
    result.error_over_tolerance = checks.max_error_over_tolerance();
    s.report.verification.merge_repeat(checks);
  }
  return result;
}

/// Writes the results in the arrays, all of which have been verified, unless --check is none; wrong
/// ones under another name.
void write_output(Suite& s, AttentionRun& run, const TensorRows& inputs) {
  const AttentionOptions& o = s.o;
  Communicator& world = s.context.world;
  if (o.passes().back() != Pass::backward) {
    Verification checks(o.tol_scale);
    run_verified(Pass::backward, run, inputs, s.reference, o.check_pairs, world, checks);
    if (o.check != "none") s.report.verification.merge_repeat(checks);
  }
  OutputFile output(world, o.output);
  write_results(output, run, s.report.inputs.empty() ? "" : s.report.inputs[0].sha256,
                provenance_of(s.context, run.workload().origin), world);
  s.context.outputs.add(std::move(output));
}

/// One schedule under one layout.
void do_configuration(Suite& s, const AttentionWorkload& workload, const TensorRows& inputs,
                      const Schedule& schedule, const LayoutKind& layout) {
  const AttentionOptions& o = s.o;
  Communicator& world = s.context.world;
  std::optional<AttentionRun> run;
  const AttentionSetup setup = setup_of(o, schedule, layout, s.memory_bytes);
  run_agreed(world, "plan", [&] { run.emplace(workload, setup, s.machine); });
  run->allocate(inputs);
  s.report.memory.plan(planned_bytes(run->plan(), workload, setup) +
                       writing_bytes(o.output, workload, world.size()));
  if (o.check != "none") run->check_counts(s.report.verification, world);
  for (const Pass pass : o.passes()) {
    if (s.context.rows.has(key_of(run->unmeasured(pass, s.cycle)))) continue;
    AttentionResult result = do_pass(s, *run, inputs, pass);
    result.cycle = s.cycle;
    finish_row(s.context, s.report, entry_of(result));
    s.context.outputs.print(s.table.row(result));
    s.results.push_back(std::move(result));
  }
  if (!o.output.empty()) write_output(s, *run, inputs);
  if (!o.trace.empty()) {
    Trace trace;
    const ClockOffset offset = common_clock(world);
    for (const Pass pass : o.passes()) run->record(pass, trace);
    const std::string text = trace_text(trace, world, offset);
    run_on_root(world, "timeline", [&] { s.context.outputs.add_text(o.trace, text); });
  }
}

void do_workload(Suite& s, const AttentionWorkload& workload) {
  const AttentionOptions& o = s.o;
  const auto inputs = s.file ? rows_of(*s.file, workload.type)
                             : random_rows(workload, static_cast<uint64_t>(o.seed));
  const bool many = o.schedule.all() || o.layout.all();
  for (const Schedule& schedule : schedules()) {
    if (!o.schedule.wants(schedule.name)) continue;
    for (const LayoutKind& layout : layout_kinds()) {
      if (!o.layout.wants(layout.name)) continue;
      try {
        do_configuration(s, workload, *inputs, schedule, layout);
      } catch (const AgreedError& error) {
        if (error.code() != ExitCode::usage || !many) throw;
        s.refused.push_back(fmt::format("under {}: {}", layout.name, error.what()));
      }
    }
  }
}

ExitCode run(AttentionOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_options(o, world.size()); });
  plan_outputs(
      context, o.report,
      {{{"--output", o.output}}, {{"--trace", o.trace}, {"--svg", o.svg}}, {{"--input", o.input}}});
  if (o.explain) return explain(o, context);
  Backend backend(context, o.backend);
  std::optional<AttentionFile> file;
  if (!o.input.empty()) file = read_attention_file(world, o.input);
  std::vector<AttentionWorkload> workloads;
  const int64_t memory = backend.memory_bytes();
  run_agreed(world, "documents", [&] {
    if (file) workloads.push_back(workload_of(*file, o));
    for (const int64_t size : o.sweep.sizes())
      if (!file) workloads.push_back(generated_workload(o, size));
    check_workloads(workloads, o, memory, world.rank());
  });
  const NetworkAndKernel made = make_network_and_kernel(context, o, backend);
  if (o.cuda_graph) run_agreed(world, "--cuda-graph", [&] { prepare_graphs(made.network); });
  AttentionWorkspace workspace;
  RunReport report = begin_attention_report(context, o, workloads.front(), backend);
  if (file) report.inputs = {{o.input, sha256_of_file(world, o.input)}};
  start_run(context, report, o.report, o.sweep.cycles * std::ssize(workloads) * rows_of_a_size(o));
  const std::vector<AnswerUse> answers = file ? keep_answers(*file, o) : std::vector<AnswerUse>();
  const bool has_peak = !backend.on_gpu() && !o.emulates_compute();
  Suite suite{o,
              file,
              context,
              {*made.kernel, made.network, backend.stream(), workspace,
               [&](bool on) { backend.check_messages(on); }},
              report,
              backend.on_gpu(),
              has_peak ? o.threads * measured_fma_peak() : 0,
              memory,
              file && file->reference ? &*file->reference : nullptr,
              attention_table().chosen(shown_columns(context, o.report))};
  context.outputs.print(suite.table.header());
  backend.check_messages(false);
  for (; suite.cycle <= o.sweep.cycles; ++suite.cycle)
    for (const AttentionWorkload& workload : workloads) do_workload(suite, workload);
  run_agreed(world, "report", [&] {
    if (suite.results.empty() && context.rows.skipped() == 0)
      throw_usage("{}", fmt::join(suite.refused, "\n"));
  });
  add_figures(report, suite.results);
  judge_answers(report, answers);
  return finish_run(context, report, o.report, [&] {
    std::string text =
        suite.table.legend(suite.results) + notes_text(suite.refused, made.kernel->note());
    if (file && file->reference && !suite.results.empty() && !context.quiet)
      text += answers_text(file->reference->generator, answers);
    if (o.cuda_graph) text += graph_text(suite.results);
    if (context.verbose) text += details_text(suite.results, o.threads);
    return text;
  });
}

}  // namespace

int main(int argc, char** argv) {
  AttentionOptions options;
  const AppInfo info{
      "gyre-attention", "Runs context-parallel attention, forward and backward.",
      "Examples: mpirun -n 4 gyre-attention --tokens 16K --heads 8 --kv-heads 2 --schedule all\n"
      "          mpirun -n 2 gyre-attention --gen dist=long-tailed,max=4K --layout all\n"
      "          gyre-attention --explain --cp 64 --tokens 1M --schedule ring --svg ring.svg\n" +
          schedule_help() + layout_help()};
  return run_app(
      argc, argv, info, [&](CLI::App& app) { declare_options(app, options); },
      [&](AppContext& context) { return run(options, context); });
}
