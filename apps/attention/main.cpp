// gyre-attention: context-parallel attention, forward and backward. Every schedule under every
// layout is timed, counted and verified.

#include <fmt/format.h>

#include <optional>

#include "apps/attention/check.hpp"
#include "apps/attention/explain.hpp"
#include "apps/attention/report.hpp"
#include "apps/attention/results.hpp"
#include "apps/attention/setup.hpp"
#include "comm/agree.hpp"
#include "comm/emulated.hpp"
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
  double peak_flops;  ///< of a rank; 0: unknown
  int64_t memory_bytes;
  const AttentionReference* reference;  ///< null: expected values are recomputed
  std::vector<AttentionResult> results = {};
  std::vector<std::string> refused = {};
};

/// Times and verifies one direction.
AttentionResult do_pass(Suite& s, AttentionRun& run, const TensorRows& inputs, Pass pass) {
  const AttentionOptions& o = s.o;
  Communicator& world = s.context.world;
  Verification checks(o.tol_scale);
  const auto check = [&] {
    AttentionChecker(run, inputs, s.reference, o.check_pairs, world).check(pass, checks);
  };
  AttentionResult result = run.measure(pass, {o.iterations, o.warmup, s.peak_flops}, world,
                                       o.check == "all" ? check : std::function<void()>{});
  if (o.check == "last") {
    run.repeat(pass);
    check();
  }
  if (o.check != "none") {
    checks.merge_over(world);
    result.check = checks.passed() ? "ok" : "FAILED";
    result.error_over_tolerance = checks.max_error_over_tolerance();
    s.report.verification.merge(checks);
  }
  return result;
}

/// One schedule under one layout.
void do_configuration(Suite& s, const AttentionWorkload& workload, const TensorRows& inputs,
                      const Schedule& schedule, const LayoutKind& layout) {
  const AttentionOptions& o = s.o;
  Communicator& world = s.context.world;
  std::optional<AttentionRun> run;
  const AttentionSetup setup = setup_of(o, schedule, layout, s.memory_bytes);
  run_agreed(world, "plan", [&] { run.emplace(workload, inputs, setup, s.machine); });
  if (o.check != "none") run->check_counts(s.report.verification, world);
  for (const Pass pass : o.passes()) {
    AttentionResult result = do_pass(s, *run, inputs, pass);
    add_result(s.report, result);
    if (s.context.root()) fmt::print("{}", attention_table().row(result));
    std::fflush(stdout);
    s.results.push_back(std::move(result));
  }
  if (!o.trace.empty()) {
    Trace trace;
    const ClockOffset offset = align_clocks(world);
    for (const Pass pass : o.passes()) run->repeat(pass, &trace);
    write_trace(o.trace, trace, world, offset);
  }
  if (o.output.empty() || (o.check != "none" && !s.report.verification.passed())) return;
  run->repeat(Pass::backward);  // the timed runs do not leave the results in the arrays
  OutputFile output(world, o.output);
  write_results(output, *run, s.report.inputs.empty() ? "" : s.report.inputs[0].sha256,
                provenance_of(s.context, workload.origin), world);
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
      } catch (const Error& error) {
        if (!error.agreed() || error.code() != ExitCode::usage || !many) throw;
        s.refused.push_back(fmt::format("under {}: {}", layout.name, error.what()));
      }
    }
  }
}

/// Prints everything after the rows of the table, and writes the files.
void present(Suite& s) {
  if (s.results.empty()) throw_usage("{}", fmt::join(s.refused, "\n"));
  add_figures(s.report, s.results);
  for (const std::string& reason : s.refused) fmt::print("# refused {}\n", reason);
  if (const std::string note = s.machine.kernel.note(); !note.empty())
    fmt::print("# kernel on rank 0: {}\n", note);
  if (s.context.verbose) {
    fmt::print("{}", peak_text(s.results.front(), s.o.threads));
    for (const AttentionResult& result : s.results) fmt::print("{}", details_text(result));
  }
  fmt::print("{}", footer_text(s.report));
  if (!s.o.csv.empty()) write_file_atomically(s.o.csv, attention_table().csv(s.results));
  if (!s.o.json.empty()) write_json(s.report, s.o.json);
}

ExitCode explain(const AttentionOptions& o, AppContext& context) {
  run_on_root(context.world, "explanation", [&] {
    const AttentionWorkload workload = generated_workload(o, o.sizes().front());
    const Explanation explanation = explain_workload(workload, o);
    fmt::print("{}", explanation.text);
    if (!o.svg.empty()) write_file_atomically(o.svg, explanation.svg);
  });
  return ExitCode::ok;
}

ExitCode run(AttentionOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_options(o, world.size()); });
  run_on_root(world, "outputs", [&] {
    check_output_places({{"--output", o.output},
                         {"--trace", o.trace},
                         {"--svg", o.svg},
                         {"--json", o.json},
                         {"--csv", o.csv}},
                        {{"--input", o.input}});
  });
  if (o.explain) return explain(o, context);
  Backend backend(context, o.backend);
  std::optional<AttentionFile> file;
  if (!o.input.empty()) file = read_attention_file(world, o.input);
  std::vector<AttentionWorkload> workloads;
  const int64_t memory = backend.memory_bytes();
  run_agreed(world, "documents", [&] {
    if (file) workloads.push_back(workload_of(*file, o));
    for (const int64_t size : o.sizes())
      if (!file) workloads.push_back(generated_workload(o, size));
    check_workloads(workloads, o, memory, world.rank());
  });
  std::unique_ptr<Communicator> slow;
  run_agreed(world, "--emulate-network", [&] {
    if (!o.network.empty()) slow = emulate_network(world, parse_network_model(o.network));
  });
  std::unique_ptr<BlockKernel> kernel;
  run_agreed(world, "--kernel", [&] { kernel = make_kernel(o, backend.stream()); });
  AttentionWorkspace workspace;
  RunReport report = begin_attention_report(context, o, workloads.front(), backend);
  if (file) report.inputs = {{o.input, sha256_of_file(world, o.input)}};
  const bool shows = context.root() && !context.quiet;
  if (shows) fmt::print("{}", header_text(report));
  if (context.root()) fmt::print("{}", attention_table().header());
  const bool compares = file && file->reference && has_exact_inputs(*file, o.types().activations);
  if (shows && file && !compares) fmt::print("{}", no_reference_text);
  Suite suite{o,       file,
              context, {*kernel, slow ? *slow : backend.world(), backend.stream(), workspace},
              report,  backend.on_gpu() ? 0 : o.threads * measured_fma_peak(),
              memory,  compares ? &*file->reference : nullptr};
  for (const AttentionWorkload& workload : workloads) do_workload(suite, workload);
  run_on_root(world, "report", [&] { present(suite); });
  return exit_code_of(judge(report));
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
