// gyre-logprobs computes log-probabilities, entropies and related results from logits that are
// split over ranks. It times, counts and verifies every operation, forward and backward.

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "apps/logprobs/registry.hpp"
#include "apps/logprobs/report.hpp"
#include "harness/suite.hpp"
#include "report/app.hpp"
#include "report/row_log.hpp"
#include "runtime/watchdog.hpp"

namespace {

using namespace gyre;

/// State that the cases of a run share.
struct Setting {
  const LogprobsOptions& o;
  const std::optional<LogprobsFile>& file;
  AppContext& context;
  Backend& machine;
  LogprobsBackend& backend;
  RunReport& report;
  int64_t memory_bytes;
  Refusals refusals = {};
  std::set<std::string> compared = {};  ///< answer arrays that results were compared with
};

std::string name_of(const LogprobsRun& run, const LogprobsWorkload& problem) {
  return fmt::format("{} by {}, {} tokens", run.operation.name, run.method.name, problem.tokens());
}

/// Plans, creates and measures an operation by one method. Adds its results to `output`.
void do_run(Setting& s, Suite<LogprobsResult>& suite, LogprobsContext& c, const LogprobsRun& run,
            const MachineRates& rates, int cycle, std::vector<LogprobsPart>& output) {
  const LogprobsOptions& o = s.o;
  const int rank = s.context.world.rank();
  run_agreed(s.context.world, run.operation.name, [&] {
    int64_t kept = 0;  // bytes kept for --output
    for (const LogprobsPart& part : output) kept += part.bytes();
    const int64_t left = s.memory_bytes == 0 ? 0 : std::max<int64_t>(1, s.memory_bytes - kept);
    const std::string reason = run.why_not(c.problem, o, left, rank);
    if (!reason.empty()) throw_usage("{}", reason);
  });
  s.report.memory.plan(run.planned_bytes(c.problem, o, rank));
  std::vector<LogprobsResult> rows = suite.wanted(rows_of(run, o, c.problem, cycle));
  if (rows.empty()) return;
  set_current_step(fmt::format("{}, {}: making inputs", run.operation.name, run.method.name));
  const std::unique_ptr<LogprobsOp> op = run.make(c);
  if (run.operation.has_backward() && o.pass != "fwd") op->prepare_backward();
  const int64_t memory_before = memory_use().current_bytes;
  op->start();
  for (LogprobsResult& row : rows) {
    const Pass pass = row.pass;
    reset_memory_peak();
    suite.measure(*op, pass, {o.repeats, o.warmup, o.check, o.tol_scale}, s.machine, std::move(row),
                  [&](LogprobsResult& result, const Measured&) {
                    complete(result, *op, run, memory_before, rates, o.in_place, s.context.world);
                  });
    if (!o.output.empty() && run.method.name == "gyre") op->collect(pass, output);
  }
}

void write_output(Setting& s, const std::vector<LogprobsPart>& output, const LogprobsContext& c) {
  run_agreed(s.context.world, "results", [&] {
    if (output.empty())
      throw_usage("--output {}: --op {} has no results for a file", s.o.output, s.o.op);
  });
  OutputFile file(s.context.world, s.o.output);
  write_results(file, output, c, checksum_of(s.report, s.o.input),
                provenance_of(s.context, c.problem.origin));
  s.context.outputs.add(std::move(file));
}

void do_workload(Setting& s, Suite<LogprobsResult>& suite, const LogprobsWorkload& problem,
                 int cycle) {
  const LogprobsOptions& o = s.o;
  const auto inputs =
      s.file ? inputs_of(*s.file, problem.type, problem.output_type) : random_inputs(problem, o);
  LogprobsContext c(problem, *inputs, o, s.backend);
  const int64_t shard = ceil_div(problem.tokens(), o.cp) * problem.vocab.columns(c.grid.tp_rank()) *
                        size_of(problem.type);
  const MachineRates rates = measure_rates(shard, o.threads, s.context.world, s.backend.stream());
  if (s.context.verbose) s.context.outputs.print(rates_text(rates));
  if (!s.context.quiet) s.context.outputs.print(smallness_text(rates, problem.tokens()));
  std::vector<LogprobsPart> output;
  for (const LogprobsRun& run : runs_of(o)) {
    const std::string refusal = suite.attempt(
        name_of(run, problem), true, [&] { do_run(s, suite, c, run, rates, cycle, output); });
    if (!refusal.empty()) s.refusals.emplace(run.operation.name, refusal);
  }
  s.compared.merge(c.compared);
  if (!o.output.empty()) write_output(s, output, c);
}

/// Throws a usage error that lists the refused runs if any is refused. With several
/// operations, it throws only if all runs are refused.
void check_workloads(const std::vector<LogprobsWorkload>& cases, const LogprobsOptions& o,
                     int64_t memory, int rank) {
  ConfigErrors refused;
  bool some = false;
  for (const LogprobsWorkload& problem : cases)
    for (const LogprobsRun& run : runs_of(o)) {
      const std::string reason = run.why_not(problem, o, memory, rank);
      some = some || reason.empty();
      if (!reason.empty()) refused.add("{}: {}", name_of(run, problem), reason);
    }
  if (!lists_several(o.op) || !some) refused.throw_if_any("impossible configuration");
}

ExitCode run(LogprobsOptions& o, AppContext& context) {
  Communicator& world = context.world;
  if (o.list) {
    context.outputs.print(operation_help());
    return ExitCode::ok;
  }
  run_agreed(world, "options", [&] { check_options(o, world.size()); });
  plan_outputs(context);
  Backend machine(context, o.backend);
  std::optional<LogprobsFile> file;
  if (!o.input.empty()) file = read_logprobs_file(world, o.input, logprobs_arrays());
  const std::string chosen = file && !o.op_is_given ? answered_operations(*file) : "";
  if (!chosen.empty()) {
    o.op = chosen;
    run_agreed(world, "options", [&] { check_options(o, world.size()); });
  }
  std::vector<LogprobsWorkload> cases;
  const int64_t memory = machine.memory_bytes();
  run_agreed(world, "tokens", [&] {
    if (file) cases.push_back(workload_of(*file, o));
    for (const int64_t size : o.sweep.sizes())
      if (!file) cases.push_back(generated_workload(o, size));
    check_workloads(cases, o, memory, world.rank());
  });
  LogprobsBackend backend(machine, {1, o.cp, o.tp});
  RunReport report = begin_logprobs_report(context, o, cases.front());
  machine.describe(report);
  o.report.metrics = metrics_of(o);
  int64_t rows = 0;
  for (const LogprobsRun& run : runs_of(o)) rows += std::ssize(run.passes(o));
  start_run(context, report, o.report, o.sweep.cycles * std::ssize(cases) * rows);
  if (!context.quiet && !chosen.empty())
    context.outputs.print(fmt::format(
        "# note: operations that {} has answers for are run; --op all runs the others, too\n",
        o.input));
  if (!context.quiet) context.outputs.print(method_note(o));
  Setting setting{o, file, context, machine, backend, report, memory};
  Suite<LogprobsResult> suite(context, report, o.report, logprobs_table());
  for (int cycle = 1; cycle <= o.sweep.cycles; ++cycle)
    for (const LogprobsWorkload& problem : cases) do_workload(setting, suite, problem, cycle);
  suite.require_rows();
  report.foms = figures_of(suite.rows());
  const std::vector<AnswerUse> answers =
      file ? answer_uses(*file, o, setting.compared, setting.refusals) : std::vector<AnswerUse>();
  judge_answers(report, answers);
  return finish_run(context, report, o.report, [&] {
    std::string text = suite.legend();
    if (file && file->reference && !context.quiet)
      text += answers_text(file->reference->generator, answers);
    text += suite.refusals();
    if (context.verbose)
      for (const LogprobsResult& row : suite.rows()) text += details_text(row);
    return text;
  });
}

}  // namespace

int main(int argc, char** argv) {
  LogprobsOptions options;
  const AppInfo info{
      "gyre-logprobs",
      "Runs log-probabilities over a vocabulary that is split over ranks, forward and backward.",
      "Examples: mpirun -n 4 gyre-logprobs --tp 2 --cp 2 --tokens 4K --vocab 32K -d bf16\n"
      "          mpirun -n 2 gyre-logprobs --op filtered --method all --top-k 50 --top-p 0.9\n"
      "          gyre-logprobs --input inputs/logprobs_golden.h5\n"
      "          mpirun -n 8 gyre-logprobs --backend cuda --tokens 16K --vocab 128K -d bf16\n"
      "Columns: rate = bytes that a rank must read and write in memory at least, over time;\n"
      "         of_bw = that rate over what its memory can do (-v); sent, msgs = of a call, of "
      "the\n"
      "         rank that sends most; extra = memory beyond inputs and outputs;\n"
      "         err_over_tol = largest error, as a share of its tolerance\n" +
          operation_help()};
  return run_app(
      argc, argv, info, [&](OptionTable& table) { declare_options(table, options); },
      [&](AppContext& context) { return run(options, context); });
}
