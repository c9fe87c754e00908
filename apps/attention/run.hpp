#pragma once
// One configuration of gyre-attention: planned, run, measured, verified.

#include "apps/attention/inputs.hpp"
#include "attention/execute.hpp"
#include "attention/schedules/registry.hpp"
#include "report/statistics.hpp"
#include "report/tolerance.hpp"
#include "report/verify.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// What one rank did in one direction.
struct AttentionRankTimes {
  double kernel_ms = 0;  ///< in the block kernel, median over iterations
  double wait_ms = 0;    ///< for messages
  double copy_ms = 0;    ///< packing, unpacking, adding, clearing, deltas
  int64_t pairs = 0;     ///< visible, times query heads
  int64_t bytes_sent = 0;
  int64_t messages = 0;
};

/// A schedule under a layout, one direction, measured.
struct AttentionResult {
  std::string schedule, layout;
  Pass pass = Pass::forward;
  int64_t tokens = 0, documents = 0;
  int cp = 1;
  Statistics time_ms;           ///< of an iteration, slowest rank
  double flops = 0;             ///< of visible pairs, all ranks
  double peak = 0;              ///< FLOP/s of a rank, measured; 0: unknown
  double compute_ms = 0;        ///< the same kernels without communication, slowest rank, median
  double communicate_ms = 0;    ///< the messages alone
  double exposed_ms = 0;        ///< median of (iteration - its compute), slowest ranks
  double exposed_noise_ms = 0;  ///< distance of the quartiles of these differences
  double wire_bytes = 0;        ///< sum over ranks, counted
  int64_t transient_bytes = 0;  ///< of the rank that needs most
  std::vector<AttentionRankTimes> ranks;
  double error_over_tolerance = 0;  ///< NaN: not checked
  std::string check;                ///< "ok", "FAILED" or "-"
  Samples samples_ms;

  double tflops_per_rank() const { return flops / cp / time_ms.median / 1e9; }
  double share_of_peak() const;
  int64_t messages() const;       ///< of the rank that sends most of them
  int64_t busiest_bytes() const;  ///< of the rank that sends most
  /// max/mean - 1 of the time in kernels; NaN where there is none.
  double kernel_imbalance() const;
  /// Share of the iteration that communication adds, copies for messages included: exposed_ms over
  /// time_ms. Noise may make it negative. NaN where nothing is sent.
  double exposed() const;
  /// Share of the communication's own time that compute hides: 1 - exposed_ms / communicate_ms,
  /// within [0, 1]. NaN where nothing is sent, and where the noise of exposed_ms is larger than
  /// communicate_ms, so that it would say nothing.
  double overlap() const;
};

/// How much is measured.
struct MeasureOptions {
  int iterations = 5, warmup = 1;
  double peak_flops = 0;  ///< of a rank; 0: unknown
};

/// What is planned and run.
struct AttentionSetup {
  const Schedule& schedule;
  const LayoutKind& layout;
  ScheduleOptions schedule_options;
  LayoutOptions layout_options;
  ElementTypes types;
  bool with_backward = true;
  bool checks = true;        ///< results are to be compared, which needs statistics of all tokens,
                             ///< in the memory that the arrays are in
  int64_t memory_bytes = 0;  ///< that this rank may use; 0: as much as it gets
};

/// Bytes that a rank allocates for a plan, copies for messages included.
int64_t planned_bytes(const RankPlan& plan, const AttentionWorkload& problem,
                      const AttentionSetup& setup);

/// Throws the usage error that an AttentionRun on `rank` of as many ranks as the layout's would
/// throw, without allocating what the plan needs.
void check_plan(const AttentionWorkload& problem, const AttentionSetup& setup, int rank);

/// What an attention runs on.
struct AttentionMachine {
  BlockKernel& kernel;
  Communicator& network;  ///< the context-parallel group
  Stream& stream;         ///< arrays lie in its space, as messages and those of the kernel do
  AttentionWorkspace& workspace;
};

class AttentionRun {
 public:
  /// Plans and fills; throws a usage error if layout or schedule refuses the problem, and if it
  /// needs more memory than it may. Every rank of the context-parallel group makes its own.
  AttentionRun(const AttentionWorkload& problem, const TensorRows& inputs,
               const AttentionSetup& setup, const AttentionMachine& machine);

  /// Pairs, messages, bytes and memory, counted on all ranks, against closed forms and the problem.
  void check_counts(Verification& checks, Communicator& world) const;
  /// Times one direction, from a barrier to the end of the slowest rank. Every iteration runs the
  /// plan; then its kernels, clears and deltas alone, on what was received; then its messages
  /// alone, with the copies that they need. If there is an `after`, all arrays but the inputs are
  /// poisoned before each iteration, and it is called after it, while the results are there.
  /// Collective.
  AttentionResult measure(Pass pass, const MeasureOptions& options, Communicator& world,
                          const std::function<void()>& after);
  /// One more iteration, not timed; with a timeline if there is one. All arrays but the inputs are
  /// poisoned before, so that nothing that an earlier iteration left can pass for a result.
  void repeat(Pass pass, Trace* trace = nullptr);

  const Layout& layout() const { return placed_.layout; }
  const Shard& shard() const { return layout().shard(plan_.rank); }
  const RankPlan& plan() const { return plan_; }
  const AttentionWorkload& problem() const { return problem_; }
  /// "ring, dual-chunk-swap, 4096 tokens"
  std::string name() const;
  const ElementTypes& types() const { return setup_.types; }
  AttentionExecutor& executor() { return executor_; }
  Stream& stream() { return machine_.stream; }
  /// `world`: the ranks of the group, small arrays of host memory. Collective.
  AttentionTolerances tolerances(Communicator& world) const;

 private:
  /// Brings the arrays into the state in which `pass` can run; not timed.
  void prepare(Pass pass, bool poisoned);
  /// Fills all arrays but the inputs with NaN.
  void poison();
  /// Counts and times of all ranks.
  void add_ranks(AttentionResult& row, const ExecutionTimes& mine, const PlanCount& counted,
                 Communicator& world) const;
  void check_traffic(Pass pass, const Traffic& before);

  const AttentionWorkload& problem_;
  WorkloadLayout placed_;
  AttentionProblem planned_;
  AttentionSetup setup_;
  RankPlan plan_;
  AttentionMachine machine_;
  AttentionExecutor executor_;
};

}  // namespace gyre
