#pragma once
// A case of gyre-recurrence: one kind under one schedule and layout, planned and filled. case.cpp
// runs it, verify.cpp compares its results with the definition in double precision.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/recurrence/workload.hpp"
#include "harness/ranks.hpp"
#include "harness/row.hpp"
#include "recurrence/execute.hpp"
#include "runtime/host_copy.hpp"

namespace gyre {

/// Measurements of a pass. FLOPs are those of the recurrence, token by token (recurrence_flops), and
/// of the convolution.
struct RecurrenceResult : MeasuredRow {
  std::string kind, schedule, layout;
  Pass pass = Pass::forward;
  int64_t tokens = 0;
  int cp = 1;
  bool replayed = false;      ///< one process ran all ranks, which took turns
  double compute_ms = 0;      ///< kernels without communication, slowest rank, median
  double communicate_ms = 0;  ///< the messages alone
  double exposed_ms = 0;      ///< median of (iteration - its compute), slowest ranks
  double imbalance = 0;       ///< max/mean - 1 of the tokens of ranks
  double more_flops = 0;      ///< of summaries, compositions and the convolution's sums again
  int64_t buffer_bytes = 0;   ///< of states and maps, the most of a rank

  /// Rate of this process, which is one rank or replays all ranks.
  double tflops_per_rank() const { return flops / (replayed ? 1 : cp) / time_ms.median / 1e9; }
  /// Exposed communication as a share of the iteration; NaN if nothing is sent.
  double exposed() const;
  std::vector<std::tuple<std::string, Value, std::string>> further() const;
};

/// Results are compared with the definition at these inputs, and with answers of a file.
struct RecurrenceExpectation {
  RecurrenceRows inputs;
  std::vector<float> weights;            ///< of the convolution, [channels, width]
  const RecurrenceReference* reference;  ///< from the file; null: the definition alone
  int64_t tokens;                        ///< tokens times heads that are computed again
};

/// Communicators, stream and threads of a rank.
struct RecurrenceMachine {
  Communicator& world;    ///< the ranks of the plan, in host memory
  Communicator& network;  ///< the same; their arrays are in the memory of the stream
  Stream& stream;
  int threads = 1;       ///< of a CPU's kernel
  bool replays = false;  ///< the ranks of the plan are all in this process
};

class RecurrenceCase final : public Case {
 public:
  /// The arguments must outlive it. Allocates and fills the arrays.
  RecurrenceCase(const RecurrenceWorkload& workload,
                 std::unique_ptr<const PlannedRecurrence> planned,
                 const RecurrenceExpectation& expected, const RecurrenceMachine& machine);

  RecurrenceResult row(Pass pass, int cycle) const;
  /// Compares counts of the plan with the closed form. Collective.
  void check_counts(Verification& checks) const;
  /// Fills in the columns of a measured pass. Collective.
  void complete(RecurrenceResult& row) const;

  std::string label(Pass pass) const override;
  void prepare(Pass pass, bool poisoned) override;
  void run(Pass pass) override;
  void start_timing(Pass pass) override;
  void run_parts(Pass pass, bool ahead) override;
  SentTraffic sent() const override;
  std::optional<SentTraffic> expected(Pass pass) const override;
  std::optional<uint64_t> checksum(Pass pass) override;
  /// Every rank compares all of its tokens in a sample of the heads of keys and their values, for
  /// which it computes its documents again; with answers in all heads. Gradients of weights are
  /// sums over all documents, which the ranks add.
  void verify(Pass pass, Verification& checks) override;

  Communicator& world() { return machine_.world; }
  const RecurrenceWorkload& workload() const { return workload_; }
  const PlannedRecurrence& planned() const { return *planned_; }
  const Shard& shard() const { return planned_->placed.layout.shard(planned_->plan.rank); }
  /// The rank's rows of an array on the host.
  HostCopy host(RecurrenceArray array) { return {executor_.data()[array], machine_.stream}; }

 private:
  std::string name() const;
  /// Fills in what the messages cost, and what they hide. Collective.
  void complete_parts(RecurrenceResult& row) const;

  const RecurrenceWorkload& workload_;
  std::unique_ptr<const PlannedRecurrence> planned_;
  const RecurrenceExpectation& expected_;
  RecurrenceMachine machine_;
  std::unique_ptr<RecurrenceKernel> kernel_;
  RecurrenceExecutor executor_;
  std::vector<double> compute_ms_, communicate_ms_;  // of the timed iterations on this rank
};

/// Cases of the ranks that this process runs.
using RecurrenceCases = CaseOfRanks<RecurrenceCase, RecurrenceResult>;

/// Writes out and gradients of the last runs, as gyre/recurrence-results. Collective.
void write_results(OutputFile& output, RecurrenceCases& subject, const std::string& input_sha256,
                   const Provenance& provenance);

}  // namespace gyre
