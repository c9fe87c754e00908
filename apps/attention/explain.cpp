#include "apps/attention/explain.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "comm/agree.hpp"
#include "predict/explain.hpp"
#include "predict/plan_svg.hpp"

namespace gyre {
namespace {

MachineModel machine_of(const AttentionOptions& o) {
  return flat_machine(1e12 * o.tflops, 1e9 * o.gbytes_per_s, 1e-6 * o.latency_us);
}

constexpr int64_t most_plan_entries = int64_t{30} << 20;  // of all ranks

/// Number of arrays, steps, messages, slices and rectangles of a plan; its memory is proportional
/// to it.
int64_t entries_of(const RankPlan& plan) {
  int64_t entries = 0;
  for (const PlanArray& array : plan.arrays) entries += 1 + std::ssize(array.rows);
  for (const std::vector<Step>* steps : {&plan.forward, &plan.backward})
    for (const Step& step : *steps) {
      ++entries;
      if (const auto* compute = std::get_if<step::Compute>(&step))
        entries += std::ssize(compute->rectangles);
      if (const auto* exchange = std::get_if<step::Exchange>(&step))
        for (const auto* messages : {&exchange->sends, &exchange->recvs})
          for (const Message& message : *messages) entries += 1 + std::ssize(message.slices);
    }
  return entries;
}

/// Estimated entries of the plans of all ranks: the most of three ranks, times cp.
int64_t estimated_entries(const AttentionWorkload& workload, const AttentionOptions& o, int cp) {
  LayoutOptions options = o.layout_options();
  options.cp = cp;
  const WorkloadLayout placed(workload, find_layout(o.layout.name), options);
  const AttentionProblem planned{&placed.layout, workload.heads, workload.mask,
                                 o.schedule_options()};
  int64_t most = 0;
  for (const int rank : {0, cp / 2, cp - 1})
    most = std::max(most, entries_of(plan_rank(find_schedule(o.schedule.name), planned, rank)));
  return most * cp;
}

void check_plan_size(const AttentionWorkload& workload, const AttentionOptions& o) {
  constexpr int always = 64;
  const auto fits = [&](int cp) {
    return cp <= always || estimated_entries(workload, o, cp) <= most_plan_entries;
  };
  // From small to large, so that no plan of one rank is made that is itself too large.
  int largest = std::min(always, o.cp);
  while (largest < o.cp && fits(std::min(2 * largest, o.cp))) largest = std::min(2 * largest, o.cp);
  if (largest < o.cp)
    throw_usage(
        "--cp {}: the plans of all ranks under {} are too large to be explained; {} ranks work",
        o.cp, o.schedule.name, largest);
}

}  // namespace

Explanation explain_workload(const AttentionWorkload& workload, const AttentionOptions& o) {
  check_plan_size(workload, o);
  const WorkloadLayout placed(workload, find_layout(o.layout.name), o.layout_options());
  const AttentionProblem planned{&placed.layout, workload.heads, workload.mask,
                                 o.schedule_options()};
  const Plan plan = plan_all(find_schedule(o.schedule.name), planned);
  std::vector<Simulation> directions;
  for (const Pass pass : o.passes())
    directions.push_back(simulate(plan, pass, workload.heads, o.types(), machine_of(o)));
  Explanation explanation{explain(plan, planned, o.types(), directions), ""};
  explanation.text += fmt::format(
      "# times are of a model: a rank computes {} TFLOP/s, sends {} GB/s, latency {} us\n",
      o.tflops, o.gbytes_per_s, o.latency_us);
  if (!o.svg.empty()) explanation.svg = plan_svg(plan, planned, directions);
  return explanation;
}

ExitCode explain(const AttentionOptions& o, AppContext& context) {
  run_agreed(context.world, "options",
             [&] { refuse_report_options(context, o.report, "--explain"); });
  std::string text;
  run_on_root(context.world, "explanation", [&] {
    const AttentionWorkload workload = generated_workload(o, o.sweep.sizes().front());
    const Explanation explanation = explain_workload(workload, o);
    text = explanation.text;
    context.outputs.add_text(o.svg, explanation.svg);
  });
  context.outputs.publish(text);
  return ExitCode::ok;
}

}  // namespace gyre
