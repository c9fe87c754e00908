#include "apps/attention/setup.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "comm/nccl.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

/// Throws the usage error that an AttentionCase of this setup on `rank` would throw, without
/// allocating the memory of the plan.
void check_plan(const AttentionWorkload& workload, const AttentionSetup& setup, int rank) {
  const WorkloadLayout placed(workload, setup.layout, setup.layout_options);
  plan_that_fits(workload, {&placed.layout, workload.heads, workload.mask, setup.schedule_options},
                 setup, rank);
}

}  // namespace

AttentionSetup setup_of(const AttentionOptions& o, const Schedule& schedule,
                        const LayoutKind& layout, int64_t memory_bytes, double peak_flops) {
  // On a GPU, the statistics for the checks are in host memory.
  const bool checks_here = o.check != "none" && !o.backend.on_gpu();
  return {
      schedule,        layout,      o.schedule_options(), o.layout_options(), o.types(),
      o.pass != "fwd", checks_here, memory_bytes,         o.cuda_graph,       o.emulates_compute(),
      peak_flops};
}

void prepare_graphs(const Communicator& network) {
  if (!network.can_record())
    throw_usage(
        "--cuda-graph: the host takes part in messages of --comm {}; a graph takes --comm nccl",
        network.backend());
  use_nccl_memory();
}

int64_t planned_bytes(const RankPlan& plan, const AttentionWorkload& workload,
                      const AttentionSetup& setup) {
  int64_t bytes = plan_bytes(plan), copies = 0;
  for (int kind = 0; kind < array_kinds; ++kind)
    if (setup.with_backward || kind <= own(ArrayKind::stats))
      bytes += stored_bytes(plan.arrays[kind], workload.heads, setup.types);
  copies = count(plan, Pass::forward, workload.heads, setup.types).transient_bytes;
  if (setup.with_backward)
    copies =
        std::max(copies, count(plan, Pass::backward, workload.heads, setup.types).transient_bytes);
  const int64_t planes = setup.with_backward ? 2 : 1;
  const auto statistics =
      static_cast<int64_t>(sizeof(double)) * planes * workload.tokens() * workload.heads.heads;
  return bytes + copies + (setup.checks ? statistics : 0);
}

RankPlan plan_that_fits(const AttentionWorkload& workload, const AttentionProblem& planned,
                        const AttentionSetup& setup, int rank) {
  RankPlan plan = plan_rank(setup.schedule, planned, rank);
  const int64_t bytes = planned_bytes(plan, workload, setup);
  if (setup.memory_bytes == 0 || bytes <= setup.memory_bytes) return plan;
  const double share = static_cast<double>(setup.memory_bytes) / static_cast<double>(bytes);
  throw_usage("schedule {}: needs {} a rank, and {} are available; about {:.0f} tokens fit",
              setup.schedule.name, si_text(bytes, "B"), si_text(setup.memory_bytes, "B"),
              std::floor(share * static_cast<double>(workload.tokens())));
}

void check_workloads(const std::vector<AttentionWorkload>& workloads, const AttentionOptions& o,
                     int64_t memory_bytes, int rank) {
  if (o.schedule.all() || o.layout.all()) return;
  const AttentionSetup setup =
      setup_of(o, find_schedule(o.schedule.name), find_layout(o.layout.name), memory_bytes);
  ConfigErrors errors;
  for (const AttentionWorkload& workload : workloads) {
    try {
      check_plan(workload, setup, rank);
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      errors.add("{} tokens: {}", workload.tokens(), error.what());
    }
  }
  errors.throw_if_any("impossible configuration");
}

}  // namespace gyre
