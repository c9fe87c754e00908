#pragma once
// A case of gyre-attention: one schedule under one layout, planned and filled. case.cpp runs it,
// verify.cpp compares its results with the definition in double precision.

#include <optional>
#include <string>
#include <vector>

#include "apps/attention/setup.hpp"
#include "attention/execute.hpp"
#include "attention/tolerance.hpp"
#include "harness/ranks.hpp"
#include "harness/row.hpp"
#include "io/schemas/attention_file.hpp"

namespace gyre {

/// Times and counts of one rank in one direction.
struct AttentionRankTimes {
  double kernel_ms = 0;  ///< in the block kernel, median over iterations
  double wait_ms = 0;    ///< waiting for messages
  double copy_ms = 0;    ///< packing, unpacking, adding, clearing, deltas
  int64_t pairs = 0;     ///< visible pairs, times query heads
  int64_t bytes_sent = 0;
  int64_t messages = 0;
};

/// Measurements of a schedule under a layout in one direction. FLOPs are of visible pairs.
struct AttentionResult : MeasuredRow {
  std::string schedule, layout;
  Pass pass = Pass::forward;
  int64_t tokens = 0;
  int cp = 1;
  bool replayed = false;        ///< one process ran all ranks, which took turns
  double peak = 0;              ///< measured FLOP/s of a rank; 0: unknown
  double compute_ms = 0;        ///< kernels without communication, slowest rank, median
  double communicate_ms = 0;    ///< the messages alone
  double exposed_ms = 0;        ///< median of (iteration - its compute), slowest ranks
  double exposed_noise_ms = 0;  ///< interquartile range of these differences
  double predicted_ms = std::numeric_limits<double>::quiet_NaN();  ///< by the model of --machine
  int64_t transient_bytes = 0;                                     ///< maximum over ranks
  /// Operations of the CUDA graph that an iteration launches on this rank; 0: no graph.
  int64_t graph_operations = 0;
  int64_t graph_windows = 0;  ///< arrays that are registered with NCCL for the graph
  std::vector<AttentionRankTimes> ranks;

  /// Rate of this process, which is one rank or replays all ranks.
  double tflops_per_rank() const { return flops / (replayed ? 1 : cp) / time_ms.median / 1e9; }
  double share_of_peak() const;
  /// max/mean - 1 of the time in kernels; NaN if that is 0.
  double kernel_imbalance() const;
  /// Exposed communication, including copies for messages, as a share of the iteration: exposed_ms
  /// over time_ms. Noise may make it negative. NaN if nothing is sent.
  double exposed() const;
  /// Share of the communication's own time that overlaps with compute: 1 - exposed_ms /
  /// communicate_ms, within [0, 1]. NaN if nothing is sent, and if the noise of exposed_ms exceeds
  /// communicate_ms.
  double overlap() const;
  std::vector<std::tuple<std::string, Value, std::string>> further() const;
};

/// The resources that an attention runs on.
struct AttentionMachine {
  Communicator& world;  ///< the ranks of the network, in host memory
  BlockKernel& kernel;
  Communicator& network;  ///< the context-parallel group
  Stream& stream;         ///< arrays and messages are in its memory space
  AttentionWorkspace& workspace;
};

struct AttentionExpectation {
  const TensorRows& inputs;
  const AttentionReference* reference;  ///< from the file; null: expected values are recomputed
  int64_t pairs;  ///< (query head, key) pairs that all ranks together recompute in one direction
};

class AttentionCase final : public Case {
 public:
  /// `planned`: the workload under the setup, planned for this rank of the network.
  AttentionCase(const AttentionWorkload& workload, PlannedPtr planned, const AttentionSetup& setup,
                const AttentionMachine& machine, const AttentionExpectation& expected);
  /// Allocates and fills the arrays, and makes the plan's communication groups. Must precede every
  /// run. Collective over the context-parallel group.
  void allocate();
  /// The row of a direction, with its key. `cycle`: number of the sweep's repetition, from 1.
  AttentionResult row(Pass pass, int cycle) const;
  /// Compares pairs, messages, bytes and memory, counted on all ranks, with closed forms and the
  /// workload. Collective.
  void check_counts(Verification& checks) const;
  /// Fills in the columns of a measured direction. Collective.
  void complete(AttentionResult& row) const;
  /// Runs one more iteration, not timed, and records a timeline. Collective.
  void record(Pass pass, Trace& trace);

  std::string label(Pass pass) const override;
  void begin(Pass pass) override;
  /// Runs a forward before a backward pass, which needs its results.
  void prepare(Pass pass, bool poisoned) override;
  /// Throws unless the traffic is that of the plan; with sinks it is not checked.
  void run(Pass pass) override;
  void start_timing(Pass pass) override;
  /// Times kernels, clears and deltas alone, then messages alone with their copies. The contents of
  /// these messages are not checked: tests/faults finds this name in backtraces.
  [[gnu::noinline]] void run_parts(Pass pass, bool ahead) override;
  bool computes() const override { return !setup_.only_sleeps; }
  SentTraffic sent() const override;
  std::optional<uint64_t> checksum(Pass pass) override;
  /// Every rank recomputes a sample of its own tokens, all of them if the budget suffices: as
  /// queries (out, lse, d_q) and as keys (d_k, d_v). Keys need the log-sum-exps and deltas of all
  /// queries, which are gathered; lse itself is verified for the recomputed queries. Gradients of
  /// sinks are recomputed from the gathered values. Arrays with answers are compared in full. The
  /// recomputation then only gives the scale of errors, and a row outside the sample takes the
  /// largest size of the sampled rows of its head. A backward pass also verifies forward results.
  void verify(Pass pass, Verification& checks) override;

  /// Log-sum-exps (plane 0) or deltas (plane 1) of all tokens, [tokens, heads], on every rank; 0
  /// where a token has no query.
  /// Collective.
  std::vector<double> statistics(int64_t plane);
  const Layout& layout() const { return planned_->placed->layout; }
  /// Tokens of the rank's own array of this kind.
  const Shard& shard(ArrayKind kind) const {
    return planned_->placed->problem.layout_of(kind).shard(plan_.rank);
  }
  const RankPlan& plan() const { return plan_; }
  const AttentionWorkload& workload() const { return workload_; }
  const AttentionExpectation& expectation() const { return expected_; }
  AttentionExecutor& executor() { return *executor_; }
  Stream& stream() { return machine_.stream; }
  Communicator& world() { return machine_.world; }
  /// Tolerances, and the expected standard deviations of errors. Collective.
  std::pair<AttentionTolerances, AttentionTolerances> tolerances() const;

 private:
  /// "ring, dual-chunk-swap, 4096 tokens"
  std::string name() const;
  /// Fills all arrays but the inputs with this byte.
  void overwrite(std::byte value);
  /// Fills in what the messages cost, and what they hide. Collective.
  void complete_parts(AttentionResult& row) const;
  /// Runs a part of the pass after a barrier, and appends its milliseconds to `to`.
  void time_part(Pass pass, Execute part, std::vector<double>& to);

  const AttentionWorkload& workload_;
  PlannedPtr planned_;
  const RankPlan& plan_;
  AttentionSetup setup_;
  AttentionMachine machine_;
  AttentionExpectation expected_;
  std::optional<AttentionExecutor> executor_;
  // Times of the timed iterations on this rank.
  std::vector<double> compute_ms_, communicate_ms_;
  std::vector<ExecutionTimes> times_;
  SentTraffic planned_sent_;  // by one run of the present pass
  int64_t graph_operations_ = 0;
};

/// Cases of the ranks that this process runs.
using AttentionRanks = CaseOfRanks<AttentionCase, AttentionResult>;

}  // namespace gyre
