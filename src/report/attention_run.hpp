#pragma once
// One configuration of gyre-attention: planned, run, measured, verified.

#include <optional>

#include "attention/execute.hpp"
#include "attention/schedules/registry.hpp"
#include "report/attention_inputs.hpp"
#include "report/statistics.hpp"
#include "report/tolerance.hpp"
#include "report/verify.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// A schedule under a layout, one direction, measured.
struct AttentionRow {
  std::string schedule, layout;
  Pass pass = Pass::forward;
  int64_t tokens = 0, documents = 0;
  int cp = 1;
  Statistics time_ms;           ///< of an iteration, slowest rank
  double flops = 0;             ///< of visible pairs, all ranks
  double peak = 0;              ///< FLOP/s of a rank, measured; 0: unknown
  double compute_ms = 0;        ///< the same kernels without communication, slowest rank, median
  double communicate_ms = 0;    ///< the messages alone
  double wire_bytes = 0;        ///< sum over ranks, counted
  double busiest_bytes = 0;     ///< of the rank that sends most
  int64_t messages = 0;         ///< of the rank that sends most
  double imbalance = 0;         ///< max/mean - 1 of the time in kernels
  int64_t transient_bytes = 0;  ///< of the rank that needs most
  double error_over_tolerance = 0;  ///< NaN: not checked
  std::string check;                ///< "ok", "FAILED" or "-"
  Samples samples_ms;

  double tflops_per_rank() const { return flops / cp / time_ms.median / 1e9; }
  double share_of_peak() const;
  /// Time that communication adds, as a share of the iteration: 1 - compute / total, at least 0.
  double exposed() const;
  /// Share of the communication's own time that compute hides: 1 - (total - compute) /
  /// communication. NaN without communication.
  double overlap() const;
};

/// How much is measured.
struct MeasureOptions {
  int iterations = 5, warmup = 1;
  double peak_flops = 0;  ///< of a rank; 0: unknown
};

class AttentionRun {
 public:
  /// Plans and fills; throws a usage error if layout or schedule refuses the problem. Collective
  /// over `world`, whose ranks are the context-parallel ones; `network` is the same group, or a
  /// slower one emulated over it.
  AttentionRun(const AttentionCase& problem, const TensorRows& inputs, const Schedule& schedule,
               const ScheduleOptions& schedule_options, const LayoutKind& layout,
               const LayoutOptions& layout_options, const ElementTypes& types, bool with_backward,
               BlockKernel& kernel, Communicator& network, AttentionWorkspace& workspace);

  /// Pairs, messages, bytes and memory, counted on all ranks, against closed forms and the problem.
  void check_counts(Verification& checks, Communicator& world) const;
  /// Times one direction. Every iteration runs the plan, then its compute alone, then its
  /// communication alone. After each complete iteration `after` is called, while the results are
  /// there. Collective.
  AttentionRow measure(Pass pass, const MeasureOptions& options, Communicator& world,
                       const std::function<void()>& after);
  /// One more iteration, not timed; with a timeline if there is one.
  void repeat(Pass pass, Trace* trace = nullptr);

  const Layout& layout() const { return placed_.layout; }
  const Shard& shard() const { return layout().shard(plan_.rank); }
  const RankPlan& plan() const { return plan_; }
  const AttentionCase& problem() const { return problem_; }
  /// "ring, dual-chunk-swap, 4096 tokens"
  std::string name() const;
  const ElementTypes& types() const { return types_; }
  AttentionExecutor& executor() { return executor_; }
  AttentionTolerances tolerances() const;

 private:
  /// Brings the arrays into the state in which `pass` can run; not timed.
  void prepare(Pass pass);
  void check_traffic(Pass pass, const Traffic& before);

  const AttentionCase& problem_;
  CaseLayout placed_;
  AttentionProblem planned_;
  const Schedule& schedule_;
  ElementTypes types_;
  RankPlan plan_;
  Communicator& network_;
  HostStream stream_;
  AttentionExecutor executor_;
};

}  // namespace gyre
