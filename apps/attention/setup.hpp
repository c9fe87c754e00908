#pragma once
// One configuration of gyre-attention before it runs: a schedule under a layout, its plan, and the
// memory that the plan needs.

#include <vector>

#include "apps/attention/options.hpp"
#include "apps/attention/workload.hpp"
#include "attention/schedules/registry.hpp"
#include "comm/communicator.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// One schedule under one layout, and the options of a run.
struct AttentionSetup {
  const Schedule& schedule;
  const LayoutKind& layout;
  ScheduleOptions schedule_options;
  LayoutOptions layout_options;
  ElementTypes types;
  bool with_backward = true;
  /// Results are verified, which needs the statistics of all tokens in the arrays' memory space.
  bool checks = true;
  int64_t memory_bytes = 0;  ///< available to this rank; 0: no limit
  bool cuda_graph = false;   ///< runs are recorded
  bool only_sleeps = false;  ///< the kernel only sleeps and leaves no results
  double peak_flops = 0;     ///< measured FLOP/s of a rank; 0: unknown
};

/// The setup of one schedule under one layout, by the options.
AttentionSetup setup_of(const AttentionOptions& o, const Schedule& schedule,
                        const LayoutKind& layout, int64_t memory_bytes, double peak_flops = 0);

/// Prepares --cuda-graph; call it before any array is made. Throws a usage error if the messages of
/// `network` cannot be recorded.
void prepare_graphs(const Communicator& network);

/// Bytes that a rank allocates for a plan: the plan itself, its arrays, copies for messages.
int64_t planned_bytes(const RankPlan& plan, const AttentionWorkload& workload,
                      const AttentionSetup& setup);

/// The plan of `rank`. Throws a usage error if the schedule refuses it, or if it needs more memory
/// than the setup allows.
RankPlan plan_that_fits(const AttentionWorkload& workload, const AttentionProblem& planned,
                        const AttentionSetup& setup, int rank);

/// With one schedule and one layout, throws a usage error that lists all workloads that they refuse
/// or that do not fit the memory of `rank`. With several it does nothing: the run skips those that
/// are refused.
void check_workloads(const std::vector<AttentionWorkload>& workloads, const AttentionOptions& o,
                     int64_t memory_bytes, int rank);

}  // namespace gyre
