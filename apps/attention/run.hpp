#pragma once
// One configuration of gyre-attention, planned and filled: runs it and measures it.

#include <functional>
#include <optional>
#include <vector>

#include "apps/attention/inputs.hpp"
#include "apps/attention/setup.hpp"
#include "attention/execute.hpp"
#include "attention/schedules/registry.hpp"
#include "report/repeat.hpp"
#include "report/tolerance.hpp"
#include "report/verify.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Times and counts of one rank in one direction.
struct AttentionRankTimes {
  double kernel_ms = 0;  ///< in the block kernel, median over iterations
  double wait_ms = 0;    ///< waiting for messages
  double copy_ms = 0;    ///< packing, unpacking, adding, clearing, deltas
  int64_t pairs = 0;     ///< visible, times query heads
  int64_t bytes_sent = 0;
  int64_t messages = 0;
};

/// Measurements of a schedule under a layout in one direction.
struct AttentionResult {
  std::string schedule, layout;
  Pass pass = Pass::forward;
  int64_t tokens = 0, documents = 0;
  int cp = 1;
  Timing timing;                ///< of an iteration
  Statistics time_ms;           ///< of its slowest rank
  double flops = 0;             ///< of visible pairs, all ranks
  double peak = 0;              ///< FLOP/s of a rank, measured; 0: unknown
  double compute_ms = 0;        ///< the same kernels without communication, slowest rank, median
  double communicate_ms = 0;    ///< the messages alone
  double exposed_ms = 0;        ///< median of (iteration - its compute), slowest ranks
  double exposed_noise_ms = 0;  ///< distance of the quartiles of these differences
  double wire_bytes = 0;        ///< sum over ranks, counted
  int64_t transient_bytes = 0;  ///< of the rank that needs the most
  /// Of the CUDA graph that an iteration launched, on this rank; 0: one launched none.
  int64_t graph_operations = 0;
  int64_t graph_windows = 0;  ///< arrays that are registered with NCCL for the graph
  std::vector<AttentionRankTimes> ranks;
  double error_over_tolerance = 0;  ///< NaN: not checked
  std::string check;                ///< "ok", "FAILED" or "-"
  int cycle = 1;                    ///< of how many times the sweep was run
  std::string finished;             ///< when: UTC, ISO 8601

  double tflops_per_rank() const { return flops / cp / time_ms.median / 1e9; }
  double share_of_peak() const;
  int64_t messages() const;       ///< of the rank that sends the most
  int64_t busiest_bytes() const;  ///< of the rank that sends the most
  /// max/mean - 1 of the time in kernels; NaN if that is 0.
  double kernel_imbalance() const;
  /// Exposed communication, including copies for messages, as a share of the iteration: exposed_ms
  /// over time_ms. Noise may make it negative. NaN if nothing is sent.
  double exposed() const;
  /// Share of the communication's own time that overlaps with compute: 1 - exposed_ms /
  /// communicate_ms, within [0, 1]. NaN if nothing is sent, and if the noise of exposed_ms exceeds
  /// communicate_ms.
  double overlap() const;
};

/// How often an iteration is repeated, and the peak to compare with.
struct IterationOptions {
  RepeatOptions repeats;
  int warmup = 1;
  double peak_flops = 0;     ///< of a rank; 0: unknown
  bool only_sleeps = false;  ///< the kernel does, and leaves no results
};

/// The resources that an attention runs on.
struct AttentionMachine {
  BlockKernel& kernel;
  Communicator& network;  ///< the context-parallel group
  Stream& stream;         ///< arrays and messages are in its memory space
  AttentionWorkspace& workspace;
  /// Whether the network's messages are checked; off but for the runs that ask for it.
  std::function<void(bool on)> check_messages;
};

class AttentionRun {
 public:
  /// Plans. Throws a usage error if layout or schedule refuses the workload, or if it needs more
  /// memory than the setup allows. Every rank of the context-parallel group constructs its own.
  AttentionRun(const AttentionWorkload& workload, const AttentionSetup& setup,
               const AttentionMachine& machine);
  /// Allocates and fills the arrays, and makes the groups that the plan communicates in; before
  /// anything runs. Collective over the context-parallel group.
  void allocate(const TensorRows& inputs);

  /// Checks pairs, messages, bytes and memory, counted on all ranks, against closed forms and the
  /// workload. Collective.
  void check_counts(Verification& checks, Communicator& world) const;
  /// Times one direction, from a barrier to the end of the slowest rank. Every iteration runs the
  /// plan; its kernels, clears and deltas alone; and its messages alone, with the copies that they
  /// need. The arrays hold the results of the last timed run afterwards. With `after`, all arrays
  /// but the inputs are poisoned before each run of the plan, and after() is called right behind
  /// it, while the arrays hold its results. Collective.
  AttentionResult measure(Pass pass, const IterationOptions& options, Communicator& world,
                          const std::function<void()>& after);
  /// What identifies a result of this direction; nothing is measured.
  AttentionResult unmeasured(Pass pass, int cycle) const;
  /// Runs one more iteration, not timed, and records a timeline.
  void record(Pass pass, Trace& trace);
  /// Runs one more iteration, not timed, with all arrays but the inputs poisoned before, so that a
  /// leftover of an earlier one cannot pass for a result, and with its messages checked; a message
  /// that arrives changed is a runtime error. On CPUs adds the check that the timed iterations of
  /// this direction gave the same bits. (On GPUs messages are not checked.) Collective.
  void repeat_checked(Pass pass, Verification& checks);

  const Layout& layout() const { return placed_.layout; }
  const Shard& shard() const { return layout().shard(plan_.rank); }
  const RankPlan& plan() const { return plan_; }
  const AttentionWorkload& workload() const { return workload_; }
  /// "ring, dual-chunk-swap, 4096 tokens"
  std::string name() const;
  const ElementTypes& types() const { return setup_.types; }
  AttentionExecutor& executor() { return *executor_; }
  Stream& stream() { return machine_.stream; }
  /// `world`: the ranks of the group, in host memory. Collective.
  AttentionTolerances tolerances(Communicator& world) const;

 private:
  struct Clocks;
  /// Runs the plan once, and times it.
  ExecutionTimes time_whole(Pass pass, Repeats& repeats, Communicator& world, bool poisoned);
  /// Runs its compute alone, then its messages alone, and times them. What these messages carry is
  /// not looked at: tests/faults finds this name, and the next, in backtraces.
  [[gnu::noinline]] void time_parts(Pass pass, Clocks& clocks, Communicator& world);
  /// Iterations of which nothing is kept.
  [[gnu::noinline]] void warm_up(Pass pass, int iterations, Communicator& world, bool poisoned);
  /// Brings the arrays into the state that `pass` needs; not timed.
  void prepare(Pass pass, bool poisoned);
  /// Fills all arrays but the inputs with this byte.
  void overwrite(std::byte value);
  /// Of the results of `pass` of this rank's tokens, in host memory.
  uint64_t checksum(Pass pass);
  /// Adds counts and times of all ranks.
  void add_ranks(AttentionResult& result, const ExecutionTimes& mine, const PlanCount& counted,
                 Communicator& world) const;
  void check_traffic(Pass pass, const Traffic& before);

  const AttentionWorkload& workload_;
  WorkloadLayout placed_;
  AttentionProblem planned_;
  AttentionSetup setup_;
  RankPlan plan_;
  AttentionMachine machine_;
  std::optional<AttentionExecutor> executor_;
  std::vector<uint64_t> timed_checksums_;  // of the last measured direction; empty on GPUs
};

}  // namespace gyre
