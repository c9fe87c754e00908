// gyre-recurrence: recurrent layers under context parallelism, forward and backward. Every kind
// under every schedule of states is timed, counted and verified.

#include <algorithm>
#include <optional>

#include "apps/common/network_options.hpp"
#include "apps/recurrence/report.hpp"
#include "comm/agree.hpp"
#include "harness/suite.hpp"
#include "recurrence/inputs.hpp"
#include "report/app.hpp"

namespace {

using namespace gyre;

/// The ranks of the plan that this process runs.
struct RanksHere {
  RanksHere(const RecurrenceOptions& o, AppContext& context, Backend& backend)
      : emulated(make_network(context, o.network, backend)) {
    if (o.replay) replay.emplace(o.cp);
    Communicator& network = emulated ? *emulated : backend.world();
    for (int rank = 0; rank < o.ranks_here(); ++rank)
      machines.push_back({replay ? replay->of(rank) : context.world,
                          replay ? replay->of(rank) : network, backend.stream(), o.threads,
                          o.replay});
  }
  std::unique_ptr<Communicator> emulated;  ///< null: there is none
  std::optional<RanksInProcess> replay;
  std::vector<RecurrenceMachine> machines;
};

/// State that the cases of a run share.
struct Setting {
  const RecurrenceOptions& o;
  const std::optional<RecurrenceFile>& file;
  AppContext& context;
  Backend& backend;
  RanksHere& here;
  RunReport& report;
};

/// Runs one kind under one schedule and layout.
void do_case(Setting& s, Suite<RecurrenceResult>& suite, const RecurrenceWorkload& workload,
             std::vector<std::unique_ptr<const PlannedRecurrence>> plans, int cycle) {
  const RecurrenceOptions& o = s.o;
  const RecurrenceShape shape = plans.front()->problem.shape;
  const RecurrenceExpectation expected{
      s.file ? rows_of(*s.file, workload.type) : random_rows(shape, o),
      s.file ? s.file->conv_weight : random_weights(shape, static_cast<uint64_t>(o.seed)),
      s.file && s.file->reference ? &*s.file->reference : nullptr, o.check_tokens};
  int64_t bytes = 0;
  std::vector<std::unique_ptr<RecurrenceCase>> ranks;
  run_agreed(s.context.world, "arrays", [&] {
    for (size_t rank = 0; rank < plans.size(); ++rank) {
      bytes += planned_bytes(*plans[rank], workload.type, s.backend.space());
      ranks.push_back(std::make_unique<RecurrenceCase>(workload, std::move(plans[rank]), expected,
                                                       s.here.machines[rank]));
    }
  });
  RecurrenceCases subject(std::move(ranks), s.here.replay ? &*s.here.replay : nullptr);
  s.report.memory.plan(bytes);
  if (o.check != "none") subject.check_counts(s.report.verification);
  std::vector<RecurrenceResult> rows;
  for (const Pass pass : o.passes()) rows.push_back(subject.rank(0).row(pass, cycle));
  const MeasureOptions measuring{o.repeats, o.warmup, o.check, o.tol_scale};
  for (RecurrenceResult& row : suite.wanted(std::move(rows)))
    suite.measure(subject, row.pass, measuring, s.backend, row,
                  [&](RecurrenceResult& result, const Measured&) { subject.complete(result); });
  if (o.output.empty()) return;
  OutputFile output(s.context.world, o.output);
  write_results(output, subject, checksum_of(s.report, o.input),
                provenance_of(s.context, workload.origin));
  s.context.outputs.add(std::move(output));
}

void do_workload(Setting& s, Suite<RecurrenceResult>& suite, const RecurrenceWorkload& workload,
                 int cycle) {
  const RecurrenceOptions& o = s.o;
  for_each_choice(
      o, [&](const RecurrenceKind& kind, const StateSchedule& schedule, const LayoutKind& layout) {
        suite.attempt(kind.name, o.has_many(), [&] {
          std::vector<std::unique_ptr<const PlannedRecurrence>> plans;
          run_agreed(s.context.world, "plan", [&] {
            const RecurrenceShape shape = s.file ? shape_of(*s.file) : shape_of(o, kind);
            const int64_t memory = s.backend.memory_bytes() / o.ranks_here();
            for (const RecurrenceMachine& machine : s.here.machines) {
              plans.push_back(std::make_unique<const PlannedRecurrence>(
                  workload, kind, shape, schedule, layout, o.layout.for_ranks(o.cp),
                  machine.network.rank()));
              const int64_t bytes = planned_bytes(*plans.back(), workload.type, s.backend.space());
              if (memory > 0 && bytes > memory)
                throw_usage("schedule {}: needs {} a rank, and {} are available", schedule.name,
                            si_text(bytes, "B"), si_text(memory, "B"));
            }
          });
          do_case(s, suite, workload, std::move(plans), cycle);
        });
      });
}

ExitCode run(RecurrenceOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_options(o, world.size()); });
  plan_outputs(context);
  if (o.explain) return explain(o, context);
  Backend backend(context, o.backend);
  std::optional<RecurrenceFile> file;
  if (!o.input.empty()) file = read_recurrence_file(world, o.input);
  std::vector<RecurrenceWorkload> workloads;
  run_agreed(world, "documents", [&] {
    if (file) o.kind = kind_of(*file).name;
    if (file) workloads.push_back(workload_of(*file, o));
    for (const int64_t size : o.sweep.sizes())
      if (!file) workloads.push_back(generated_workload(o, size));
  });
  const RecurrenceShape shape = file ? shape_of(*file) : shape_of(o, recurrence_kinds().front());
  RunReport report = begin_recurrence_report(context, o, workloads.front(), shape, backend);
  start_run(context, report, o.report, o.sweep.cycles * std::ssize(workloads) * rows_of_a_size(o));
  const std::vector<AnswerUse> answers = file ? keep_answers(*file, o) : std::vector<AnswerUse>();
  RanksHere here(o, context, backend);
  Setting setting{o, file, context, backend, here, report};
  Suite<RecurrenceResult> suite(context, report, o.report, recurrence_table());
  for (int cycle = 1; cycle <= o.sweep.cycles; ++cycle)
    for (const RecurrenceWorkload& workload : workloads)
      do_workload(setting, suite, workload, cycle);
  suite.require_rows();
  if (!o.replay) add_figures(report, suite.rows());
  judge_answers(report, answers);
  return finish_run(context, report, o.report, [&] {
    std::string text = suite.legend() + suite.refusals();
    if (file && file->reference && !suite.rows().empty() && !context.quiet)
      text += answers_text(file->reference->generator, answers);
    return text;
  });
}

}  // namespace

int main(int argc, char** argv) {
  RecurrenceOptions options;
  const AppInfo info{
      "gyre-recurrence", "Runs recurrent layers over ranks, forward and backward.",
      "Examples: mpirun -n 4 gyre-recurrence --tokens 16K --kind gdn --schedule all\n"
      "          mpirun -n 2 gyre-recurrence --gen dist=long-tailed,max=4K --kind all\n"
      "          gyre-recurrence --explain --cp 8 --tokens 1M --tflops 100 --gbps 50\n" +
          layout_help()};
  return run_app(
      argc, argv, info, [&](OptionTable& table) { declare_options(table, options); },
      [&](AppContext& context) { return run(options, context); });
}
