#pragma once
// A case of gyre-recurrence: one kind under one schedule and layout, planned and filled. case.cpp
// runs it, verify.cpp compares its results with the definition in double precision.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/recurrence/workload.hpp"
#include "harness/case.hpp"
#include "harness/row.hpp"
#include "recurrence/execute.hpp"

namespace gyre {

/// Measurements of a pass. FLOPs are those of the recurrence, token by token (recurrence_flops), and
/// of the convolution.
struct RecurrenceResult : MeasuredRow {
  std::string kind, schedule, layout;
  Pass pass = Pass::forward;
  int64_t tokens = 0;
  int cp = 1;
  double compute_ms = 0;      ///< kernels without communication, slowest rank, median
  double communicate_ms = 0;  ///< the messages alone
  double exposed_ms = 0;      ///< median of (iteration - its compute), slowest ranks
  double imbalance = 0;       ///< max/mean - 1 of the tokens of ranks
  double more_flops = 0;      ///< of summaries, compositions and the convolution's sums again
  int64_t buffer_bytes = 0;   ///< of states and maps, the most of a rank

  double tflops_per_rank() const { return flops / cp / time_ms.median / 1e9; }
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

class RecurrenceCase final : public Case {
 public:
  /// The arguments must outlive it. Allocates and fills the arrays.
  RecurrenceCase(const RecurrenceWorkload& workload, const PlannedRecurrence& planned,
                 const RecurrenceExpectation& expected, Communicator& group, int threads);

  RecurrenceResult row(Pass pass, int cycle) const;
  /// Compares counts of the plan with the closed form. Collective.
  void check_counts(Verification& checks) const;
  /// Fills in the columns of a measured pass. Collective.
  void complete(RecurrenceResult& row) const;

  /// Writes out and gradients of the last runs, as gyre/recurrence-results. Collective.
  void write_results(OutputFile& output, const std::string& input_sha256,
                     const Provenance& provenance);

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

 private:
  const Shard& shard() const { return planned_.placed.layout.shard(planned_.plan.rank); }
  std::string name() const;

  const RecurrenceWorkload& workload_;
  const PlannedRecurrence& planned_;
  const RecurrenceExpectation& expected_;
  Communicator& group_;
  RecurrenceKernel kernel_;
  RecurrenceExecutor executor_;
  std::vector<double> compute_ms_, communicate_ms_;  // of the timed iterations on this rank
};

}  // namespace gyre
