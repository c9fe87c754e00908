// gyre-attention: context-parallel attention, forward and backward. Every schedule under every
// layout is timed, counted and verified.

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "apps/attention/forecast.hpp"
#include "apps/attention/report.hpp"
#include "apps/attention/setup.hpp"
#include "comm/trace_file.hpp"
#include "harness/suite.hpp"
#include "report/app.hpp"
#include "runtime/peak.hpp"

namespace {

using namespace gyre;

/// The ranks of the plan that this process runs, and what each runs on.
struct RanksHere {
  RanksHere(const AttentionOptions& o, Communicator& world, const NetworkAndKernel& made,
            Stream& stream)
      : workspaces(o.ranks_here()) {
    if (o.replay) replay.emplace(o.cp);
    for (int rank = 0; rank < o.ranks_here(); ++rank)
      machines.push_back({replay ? replay->of(rank) : world, *made.kernel,
                          replay ? replay->of(rank) : made.network, stream, workspaces[rank]});
  }
  std::vector<AttentionWorkspace> workspaces;
  std::optional<RanksInProcess> replay;
  std::vector<AttentionMachine> machines;
};

/// State that the cases of a run share.
struct Setting {
  const AttentionOptions& o;
  const std::optional<AttentionFile>& file;
  AppContext& context;
  Backend& backend;
  RanksHere& here;
  RunReport& report;
  double peak_flops;  ///< FLOP/s of a rank; 0: unknown
  int64_t memory_bytes;
};

/// Writes the results of the last timed iteration, verified unless --check is none. Wrong results
/// go to a file of another name.
void write_output(Setting& s, AttentionRanks& subject) {
  OutputFile output(s.context.world, s.o.output);
  write_results(output, subject, checksum_of(s.report, s.o.input),
                provenance_of(s.context, subject.rank(0).workload().origin));
  s.context.outputs.add(std::move(output));
}

void write_timeline(Setting& s, AttentionCase& subject) {
  Trace trace;
  const ClockOffset offset = common_clock(s.context.world);
  s.backend.check_messages(false);
  for (const Pass pass : s.o.passes()) subject.record(pass, trace);
  const std::string text = trace_text(trace, s.context.world, offset);
  s.backend.check_messages(true);
  run_on_root(s.context.world, "timeline", [&] { s.context.outputs.add_text(s.o.trace, text); });
}

/// Runs one schedule under one layout, which it plans first if `planned` is null.
void do_case(Setting& s, Suite<AttentionResult>& suite, const AttentionSetup& setup,
             const AttentionWorkload& workload, PlannedPtr planned,
             const AttentionExpectation& expected, const std::vector<double>& predicted,
             int cycle) {
  const AttentionOptions& o = s.o;
  Communicator& world = s.context.world;
  std::vector<std::unique_ptr<AttentionCase>> ranks;
  int64_t bytes = 0;
  run_agreed(world, "plan", [&] {
    for (const AttentionMachine& machine : s.here.machines) {
      const int rank = machine.network.rank();
      if (!planned || planned->plan.rank != rank)
        planned = std::make_shared<const PlannedAttention>(workload, setup, rank,
                                                           planned ? planned->placed : nullptr);
      bytes += planned_bytes(planned->plan, workload, setup);
      ranks.push_back(std::make_unique<AttentionCase>(workload, planned, setup, machine, expected));
    }
  });
  AttentionRanks subject(std::move(ranks), s.here.replay ? &*s.here.replay : nullptr);
  subject.each([](AttentionCase& rank) { rank.allocate(); });
  s.report.memory.plan(bytes);
  if (o.check != "none") subject.check_counts(s.report.verification);
  std::vector<AttentionResult> rows;
  for (const Pass pass : o.passes()) {
    rows.push_back(subject.rank(0).row(pass, cycle));
    rows.back().predicted_ms = 1e3 * predicted.at(rows.size() - 1);
  }
  // With --cuda-graph, the first run of a pass allocates and the second records the graph.
  const MeasureOptions measuring{o.repeats, o.cuda_graph ? std::max(2, o.warmup) : o.warmup,
                                 o.check, o.tol_scale};
  for (AttentionResult& row : suite.wanted(std::move(rows)))
    suite.measure(subject, row.pass, measuring, s.backend, row,
                  [&](AttentionResult& result, const Measured&) { subject.complete(result); });
  if (!o.output.empty()) write_output(s, subject);
  if (!o.trace.empty()) write_timeline(s, subject.rank(0));
}

void do_workload(Setting& s, Suite<AttentionResult>& suite, const AttentionWorkload& workload,
                 const PlannedPtr& planned, const std::vector<AttentionChoice>& choices,
                 int cycle) {
  const AttentionOptions& o = s.o;
  const auto inputs = s.file ? rows_of(*s.file, workload.type) : random_rows(workload, o.seed);
  const AttentionExpectation expected{
      *inputs, s.file && s.file->reference ? &*s.file->reference : nullptr, o.check_pairs};
  const bool many = !o.automatic && (o.schedule.several() || o.layout.several());
  for (const AttentionChoice& choice : choices)
    suite.attempt("under " + choice.layout.name, many, [&] {
      do_case(s, suite, setup_of(o, choice.schedule, choice.layout, s.memory_bytes, s.peak_flops),
              workload, planned, expected, choice.seconds, cycle);
    });
}

ExitCode run(AttentionOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_options(o, world.size()); });
  plan_outputs(context);
  if (o.explain) return explain(o, context);
  Backend backend(context, o.backend);
  std::optional<AttentionFile> file;
  if (!o.input.empty()) file = read_attention_file(world, o.input);
  std::vector<AttentionWorkload> workloads;
  std::vector<PlannedPtr> plans;
  const int64_t memory = backend.memory_bytes() / o.ranks_here();
  run_agreed(world, "documents", [&] {
    if (file) workloads.push_back(workload_of(*file, o));
    for (const int64_t size : o.sweep.sizes())
      if (!file) workloads.push_back(generated_workload(o, size));
    plans = plan_workloads(workloads, o, memory, world.rank());
  });
  const Forecast forecast(o, context);
  std::vector<std::vector<AttentionChoice>> choices;
  for (const AttentionWorkload& workload : workloads) choices.push_back(forecast.choices(workload));
  const NetworkAndKernel made = make_network_and_kernel(context, o, backend);
  if (o.cuda_graph) run_agreed(world, "--cuda-graph", [&] { prepare_graphs(made.network); });
  RanksHere here(o, world, made, backend.stream());
  RunReport report = begin_attention_report(context, o, workloads.front(), backend);
  start_run(context, report, o.report, o.sweep.cycles * std::ssize(workloads) * rows_of_a_size(o));
  const std::vector<AnswerUse> answers = file ? keep_answers(*file, o) : std::vector<AnswerUse>();
  const bool has_peak = !backend.on_gpu() && !o.emulates_compute();
  const double peak = has_peak ? o.threads * measured_fma_peak() : 0;
  Setting setting{o, file, context, backend, here, report, peak, memory};
  Suite<AttentionResult> suite(context, report, o.report, attention_table());
  for (int cycle = 1; cycle <= o.sweep.cycles; ++cycle)
    for (size_t i = 0; i < workloads.size(); ++i)
      do_workload(setting, suite, workloads[i], plans[i], choices[i], cycle);
  suite.require_rows();
  if (!o.replay) add_figures(report, suite.rows());
  judge_answers(report, answers);
  return finish_run(context, report, o.report, [&] {
    std::string text = suite.legend() + suite.refusals();
    if (!o.replay) text += winners_text(suite.rows()) + forecast_text(suite.rows(), o.sweep.cycles);
    if (const std::string note = made.kernel->note(); !note.empty())
      text += fmt::format("# kernel on rank 0: {}\n", note);
    if (file && file->reference && !suite.rows().empty() && !context.quiet)
      text += answers_text(file->reference->generator, answers);
    if (o.cuda_graph) text += graph_text(suite.rows());
    if (context.verbose) text += details_text(suite.rows(), o.threads);
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
      "          gyre-attention --explain --cp 8 --tokens 1M --tflops 400 --gbps 50 --svg r.svg\n" +
          schedule_help() + layout_help()};
  return run_app(
      argc, argv, info, [&](OptionTable& table) { declare_options(table, options); },
      [&](AppContext& context) { return run(options, context); });
}
