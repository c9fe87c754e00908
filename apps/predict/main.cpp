// gyre-predict: predicts the fastest schedule on a machine for each number of ranks and tokens. It
// uses the plans of gyre-attention and gyre-pipeline and a file that describes the machine.

#include <fmt/format.h>
#include <malloc.h>

#include <utility>

#include "apps/predict/options.hpp"
#include "apps/predict/run.hpp"
#include "attention/schedules/registry.hpp"
#include "harness/suite.hpp"
#include "predict/chakra.hpp"
#include "predict/goal.hpp"
#include "report/app.hpp"
#include "report/progress.hpp"

namespace {

using namespace gyre;

std::string picture_title(const PredictOptions& o, const MachineModel& machine) {
  if (!o.recurrence.empty())
    return fmt::format("{}: {}, {} heads of {} values, {} of {} keys, {}", machine.name,
                       o.recurrence, o.heads, o.v_head_dim, o.key_heads, o.head_dim, o.dtype);
  return fmt::format("{}: {} heads of {}, {} of keys, {}, {}", machine.name, o.heads,
                     name_of_dims(o.head_shape()), o.kv_heads, o.mask.mask, o.dtype);
}

/// Predicts one layer under schedules of a registry.
template <class Entry>
ExitCode predict_layer(const PredictOptions& o, const std::vector<Entry>& registry,
                       const MachineModel& machine, AppContext& context) {
  const std::vector<Draws> sizes = documents_of(o);
  RunReport report = begin_predicting(context, o, machine, sizes.front().front().origin);
  start_run(context, report, o.report, rows_of(o, sizes.size()));
  const Table<PredictedRow> table = predicted_table(machine, o.seeds > 1);
  Suite<PredictedRow> suite(context, report, o.report, table);
  Refusals refused;
  for_each_configuration(
      o, registry, sizes.size(),
      [&](int cp, size_t size, const Entry& schedule, const LayoutKind& layout) {
        const PredictedDocuments& documents = sizes[size].front();
        context.progress.detail(fmt::format("{}, {}, cp {}, {} tokens", schedule.name, layout.name,
                                            cp, documents.tokens()));
        refused.collect(o.has_several(), cp, schedule.name, layout, [&] {
          const PredictedCase<Entry> one{o, documents, cp, schedule, layout, machine};
          for (PredictedRow& row : predict_draws(sizes[size], one, report.verification))
            suite.add(std::move(row));
        });
      });
  if (suite.rows().empty()) throw_usage("nothing can be predicted:\n{}", refused.text());
  const std::vector<Winner> winners = winners_of(suite.rows(), machine.order_margin);
  for (const Winner& w : winners)
    report.foms.push_back({"predicted_tflops_per_rank",
                           w.tflops_per_rank,
                           "TFLOP/s",
                           {{"cp", int64_t{w.cp}},
                            {"tokens", w.tokens},
                            {"schedule", w.schedule},
                            {"layout", w.layout}}});
  return finish_run(context, report, o.report, [&] {
    if (!o.svg.empty())
      context.outputs.add_text(o.svg, winners_svg(winners, picture_title(o, machine)));
    const auto one = [&] {
      return PredictedCase<Schedule>{o,
                                     sizes.front().front(),
                                     o.cps.front(),
                                     find_schedule(o.schedule.name),
                                     find_layout(o.layout.name),
                                     machine};
    };
    if (!o.trace.empty()) context.outputs.add_text(o.trace, predicted_trace(one()));
    if (!o.goal.empty()) context.outputs.add_text(o.goal, goal_text(predicted_programs(one())));
    if (!o.chakra.empty()) {
      const std::vector<Programs> programs = predicted_programs(one());
      for (int rank = 0; rank < programs.front().ranks(); ++rank)
        context.outputs.add_text(fmt::format("{}.{}.et", o.chakra, rank),
                                 chakra_trace(programs, rank));
    }
    return (o.recurrence.empty() ? error_text(machine) : recurrence_error_text()) +
           winners_text(winners) + refused.text();
  });
}

ExitCode run(PredictOptions& o, AppContext& context) {
  check_options(o, context.world.size());
  o.report.metrics = metrics_of(o);
  plan_outputs(context);
  const MachineModel machine = machine_of(o);
  if (!o.model.empty()) return predict_model(o, machine, context);
  return o.recurrence.empty() ? predict_layer(o, schedules(), machine, context)
                              : predict_layer(o, state_schedules(), machine, context);
}

/// Thousands of plans of megabytes are made and freed. glibc would return their memory to the
/// system, which would clear it again for the next plan.
void keep_freed_memory() {
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 30 << 20);
}

}  // namespace

int main(int argc, char** argv) {
  keep_freed_memory();
  PredictOptions options;
  const AppInfo info{
      "gyre-predict",
      "Predicts context-parallel attention, a recurrent layer, or a scoring pass: every schedule, "
      "on a machine that a file describes.",
      "Examples: gyre-predict --machine h100-sxm-8 --cp 8 --tokens 128K\n"
      "          gyre-predict --machine h100-sxm-8 --cp 8,16,32,64 \\\n"
      "                       --min 32K --max 1M --factor 2 --svg winners.svg\n"
      "          gyre-predict --machine h100-sxm-8 --recurrence gdn --cp 8 --layout contiguous\n"
      "          gyre-predict --machine h100-sxm-8 --model llama-3.1-8b --dp 4 --tp 8\n" +
          schedule_help() + layout_help(),
      false};
  return run_app(
      argc, argv, info, [&](OptionTable& table) { declare_options(table, options); },
      [&](AppContext& context) { return run(options, context); });
}
