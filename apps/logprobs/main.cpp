// gyre-logprobs: log-probabilities, entropies and their kin from logits that are split over ranks:
// every operation, forward and backward, timed, counted and verified.

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "apps/logprobs/registry.hpp"
#include "apps/logprobs/report.hpp"
#include "comm/agree.hpp"
#include "io/sha256.hpp"
#include "report/app.hpp"
#include "report/provenance.hpp"
#include "report/row_log.hpp"

namespace {

using namespace gyre;

/// Everything that all operations of a run share.
struct Suite {
  const LogprobsOptions& o;
  const std::optional<LogprobsFile>& file;
  AppContext& context;
  LogprobsBackend& backend;
  RunReport& report;
  int64_t memory_bytes;
  Table<LogprobsResult> table;  ///< the columns that are shown
  int cycle = 1;
  std::vector<LogprobsResult> rows = {};
  std::vector<std::string> refused = {};
  Refusals refusals = {};
  std::set<std::string> compared = {};  ///< arrays of answers
};

std::string refusal_text(const LogprobsOperation& operation, bool upstream,
                         const LogprobsWorkload& problem, const std::string& reason) {
  return fmt::format("{} by {}, {} tokens: {}", operation.name, upstream ? "upstream" : "gyre",
                     problem.tokens(), reason);
}

void do_operation(Suite& s, LogprobsContext& context, const LogprobsOperation& operation,
                  bool upstream, const MachineRates& rates, std::vector<LogprobsPart>* output) {
  const auto wanted = [&](const LogprobsResult& row) { return !s.context.rows.has(key_of(row)); };
  const auto add = [&](LogprobsResult row) {
    finish_row(s.context, s.report, entry_of(row));
    s.context.outputs.print(s.table.row(row));
    s.rows.push_back(std::move(row));
  };
  run_operation(operation, upstream, context, rates, {s.cycle, wanted, add}, output,
                s.report.verification);
}

void do_workload(Suite& s, const LogprobsWorkload& problem) {
  const LogprobsOptions& o = s.o;
  const auto inputs =
      s.file ? inputs_of(*s.file, problem.type, problem.output_type) : random_inputs(problem, o);
  LogprobsContext context(problem, *inputs, o, s.backend);
  const int64_t shard = ceil_div(problem.tokens(), o.cp) *
                        problem.vocab.columns(context.grid.tp_rank()) *
                        static_cast<int64_t>(size_of(problem.type));
  const MachineRates rates = measure_rates(shard, o.threads, s.context.world, s.backend.stream());
  if (s.context.verbose) s.context.outputs.print(rates_text(rates));
  if (!s.context.quiet) s.context.outputs.print(smallness_text(rates, problem.tokens()));
  std::vector<LogprobsPart> output;
  for_each_run(o, [&](const LogprobsOperation& operation, bool upstream) {
    try {
      run_agreed(s.context.world, operation.name, [&] {
        int64_t kept = 0;  // for --output
        for (const LogprobsPart& part : output) kept += part.bytes();
        const int64_t left = s.memory_bytes == 0 ? 0 : std::max<int64_t>(1, s.memory_bytes - kept);
        const std::string reason =
            why_not(operation, upstream, problem, o, left, s.context.world.rank());
        if (!reason.empty()) throw_usage("{}", reason);
      });
      s.report.memory.plan(planned_bytes(operation, upstream, problem, o, s.context.world.rank()));
      do_operation(s, context, operation, upstream, rates, o.output.empty() ? nullptr : &output);
    } catch (const AgreedError& error) {
      if (error.code() != ExitCode::usage) throw;
      s.refused.push_back(refusal_text(operation, upstream, problem, error.what()));
      s.refusals.emplace(operation.name, error.what());
    }
  });
  s.compared.merge(context.compared);
  if (o.output.empty()) return;
  run_agreed(s.context.world, "results", [&] {
    if (output.empty())
      throw_usage("--output {}: --op {} has no results for a file", o.output, o.op);
  });
  OutputFile file(s.context.world, o.output);
  write_results(file, output, context, s.report.inputs.empty() ? "" : s.report.inputs[0].sha256,
                provenance_of(s.context, problem.origin));
  s.context.outputs.add(std::move(file));
}

/// Throws a usage error that lists what cannot be, or needs more memory than `rank` has: with one
/// operation, any of its sizes. A run of all operations goes on with the others, if there are any.
void check_workloads(const std::vector<LogprobsWorkload>& cases, const LogprobsOptions& o,
                     int64_t memory, int rank) {
  ConfigErrors all, fatal;
  bool some = false;
  for (const LogprobsWorkload& problem : cases)
    for_each_run(o, [&](const LogprobsOperation& operation, bool upstream) {
      const std::string reason = why_not(operation, upstream, problem, o, memory, rank);
      some = some || reason.empty();
      if (reason.empty()) return;
      for (ConfigErrors* errors : {&all, o.op != "all" ? &fatal : nullptr})
        if (errors != nullptr)
          errors->add("{}", refusal_text(operation, upstream, problem, reason));
    });
  fatal.throw_if_any("impossible configuration");
  if (!some) all.throw_if_any("impossible configuration");
}

/// What comes behind the rows.
std::string text_of(const Suite& s, const std::vector<AnswerUse>& answers) {
  std::string text = s.table.legend(s.rows);
  if (s.file && s.file->reference && !s.context.quiet)
    text += answers_text(s.file->reference->generator, answers);
  for (const std::string& reason : s.refused) text += fmt::format("# refused {}\n", reason);
  if (s.context.verbose)
    for (const LogprobsResult& row : s.rows) text += details_text(row);
  return text;
}

ExitCode run(LogprobsOptions& o, AppContext& context) {
  Communicator& world = context.world;
  if (o.list) {
    context.outputs.print(operation_help());
    return ExitCode::ok;
  }
  run_agreed(world, "options", [&] { check_options(o, world.size()); });
  plan_outputs(context, o.report, {{{"--output", o.output}}, {}, {{"--input", o.input}}});
  Backend machine(context, o.backend);
  std::optional<LogprobsFile> file;
  if (!o.input.empty()) file = read_logprobs_file(world, o.input, logprobs_arrays());
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
  if (file) report.inputs = {{o.input, sha256_of_file(world, o.input)}};
  start_run(context, report, o.report, o.sweep.cycles * std::ssize(cases) * rows_of_a_size(o));
  if (!context.quiet) context.outputs.print(method_note(o));
  Suite suite{o,
              file,
              context,
              backend,
              report,
              memory,
              logprobs_table().chosen(shown_columns(context, o.report))};
  context.outputs.print(suite.table.header());
  for (; suite.cycle <= o.sweep.cycles; ++suite.cycle)
    for (const LogprobsWorkload& problem : cases) do_workload(suite, problem);
  run_agreed(world, "report", [&] {
    if (suite.rows.empty() && context.rows.skipped() == 0)
      throw_usage("{}", fmt::join(suite.refused, "\n"));
  });
  add_figures(report, suite.rows);
  const std::vector<AnswerUse> answers =
      file ? answer_uses(*file, o, suite.compared, suite.refusals) : std::vector<AnswerUse>();
  judge_answers(report, answers);
  return finish_run(context, report, o.report, [&] { return text_of(suite, answers); });
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
      argc, argv, info, [&](CLI::App& app) { declare_options(app, options); },
      [&](AppContext& context) { return run(options, context); });
}
