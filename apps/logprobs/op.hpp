#pragma once
// The operations of gyre-logprobs: one interface for whatever src/logprobs can do, and their
// registry. Adding one = an adaptor in a file report/logprobs_ops_*.cpp and a line in the registry.

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/logprobs/backend.hpp"
#include "apps/logprobs/inputs.hpp"
#include "report/tolerance.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Rows of logits as they lie on one rank, and what is asked of each.
class LogprobsRows {
 public:
  /// tokens [rows]: the token of each row, negative for padding.
  LogprobsRows(const LogprobsWorkload& problem, const LogprobsInputs& inputs,
               std::vector<int64_t> tokens, int tp_rank, bool in_place);
  /// In the memory of `stream`, in whose order matrices are filled and copied.
  LogprobsRows(const LogprobsWorkload& problem, const LogprobsInputs& inputs,
               std::vector<int64_t> tokens, int tp_rank, bool in_place, Stream& stream);

  int64_t rows() const { return std::ssize(tokens_); }
  std::span<const int64_t> tokens() const { return tokens_; }
  MatrixRef logits() { return logits_.ref(); }
  /// Where gradients go: the logits' memory if in place. After prepare_gradient().
  MatrixRef d_logits() { return in_place_ ? logits_.ref() : second_.ref(); }
  /// Makes room for a gradient: another matrix, or, in place, a copy of the logits, which are put
  /// back from there when a gradient has taken their place.
  void prepare_gradient();
  /// Puts the logits back if a gradient may have taken their place.
  void restore();
  /// Fills gradients with NaN, unless they are to take the place of the logits.
  void poison();
  /// Fills them with NaN in any case, after prepare_gradient(): for what is no gradient.
  void clobber();
  /// Made when it is asked for.
  MatrixRef teacher();
  std::span<const int32_t> targets() const { return targets_.span(); }  ///< [rows]
  std::span<const int32_t> ids() const { return ids_.span(); }          ///< [rows, picks]
  /// Gradient of result `i` of each row, see LogprobsInputs::gradient; 0 for padding.
  std::vector<float> gradients(int64_t i) const;

 private:
  LogprobsRows(const LogprobsWorkload& problem, const LogprobsInputs& inputs,
               std::vector<int64_t> tokens, int tp_rank, bool in_place, Stream* stream);

  HostStream host_;
  Stream& stream_;
  const LogprobsInputs& inputs_;
  std::vector<int64_t> tokens_;
  int64_t first_column_;
  bool in_place_, has_second_ = false, has_teacher_ = false;
  LogitMatrix logits_;
  LogitMatrix second_;  // gradients; in place, the original
  LogitMatrix teacher_;
  Buffer<int32_t> targets_, ids_;
};

/// What the operations of one case share.
class LogprobsContext {
 public:
  LogprobsContext(const LogprobsWorkload& problem_, const LogprobsInputs& inputs_,
                  const LogprobsOptions& options_, LogprobsBackend& backend_)
      : problem(problem_),
        inputs(inputs_),
        options(options_),
        backend(backend_),
        grid(backend_.grid()) {}

  const LogprobsWorkload& problem;
  const LogprobsInputs& inputs;
  const LogprobsOptions& options;
  LogprobsBackend& backend;
  ProcessGrid& grid;  ///< the backend's, of host memory

  /// Tokens of this rank when they are dealt in order, as evenly as can be, over context-parallel
  /// ranks.
  std::vector<int64_t> tokens_in_order() const;
  /// Their rows.
  LogprobsRows& in_order();
  /// Rows under --layout, for packed sequences; made anew, and takes the place of the other.
  LogprobsRows& by_layout(std::vector<int64_t> tokens);
  /// Gives the memory of rows back.
  void release() { rows_ = nullptr; }

 private:
  std::unique_ptr<LogprobsRows> rows_;
  bool ordered_ = false;
};

/// What a rank sends in one call, on all communicators of the backend's grids together.
struct SentTraffic {
  int64_t messages = 0;
  int64_t bytes = 0;
};

/// Results of this rank's tokens for a file.
struct LogprobsOutput {
  std::vector<float> logprob, entropy, filtered_logprob;  ///< [rows]
  std::vector<float> top_values;                          ///< [rows, length]
  std::vector<int32_t> top_ids;
};

class LogprobsOp {
 public:
  LogprobsOp(LogprobsContext& context, bool upstream) : c_(context), upstream_(upstream) {}
  virtual ~LogprobsOp() = default;
  LogprobsOp(const LogprobsOp&) = delete;
  LogprobsOp& operator=(const LogprobsOp&) = delete;

  /// Makes the object of src/logprobs. What it holds counts as extra memory. Collective.
  virtual void start() = 0;
  /// One call. Backward needs a forward before it. Collective.
  void run(Pass pass) { pass == Pass::forward ? forward_() : backward_(); }
  bool has_backward() const { return static_cast<bool>(backward_); }
  /// Makes room for the outputs of backward, which may be that of inputs; not timed.
  virtual void prepare_backward() {}
  /// Puts inputs back that backward took the place of; not timed.
  virtual void restore() {}
  /// Fills outputs with NaN.
  virtual void poison() = 0;

  /// What this rank must send in a call; nothing if that depends on the logits.
  virtual std::optional<SentTraffic> expected(Pass pass) const = 0;
  /// Bytes that this rank must read and write in memory at least; NaN: hardly any.
  virtual double ideal_bytes(Pass pass) const = 0;
  /// Of this rank; NaN where bytes are what counts.
  virtual double flops(Pass) const { return std::numeric_limits<double>::quiet_NaN(); }
  /// Something to say about the last call, or nothing.
  virtual std::string note() const { return ""; }
  /// Puts results of the last forward pass where --output wants them, if it does.
  virtual void collect(LogprobsOutput&) const {}
  /// Compares what the last call of `pass` left; `label` begins the names of checks.
  virtual void verify(Pass pass, const std::string& label, Verification& checks) = 0;

 protected:
  Communicator& tp() const { return c_.grid.tp(); }
  /// The same ranks, for matrices.
  Communicator& tp_arrays() const { return c_.backend.arrays().tp(); }
  Stream& stream() const { return c_.backend.stream(); }
  /// Of matrices; null: the host's.
  RowKernels* kernels() const { return c_.backend.row_kernels(); }
  MemorySpace space() const { return c_.backend.space(); }
  /// A row of a result to be verified; holds until the next call.
  ConstMatrixRef host_row(ConstMatrixRef matrix, int64_t row) {
    return host_row_.read(matrix, row, stream());
  }
  const VocabPartition& vocab() const { return c_.problem.vocab; }
  int64_t first_column() const { return vocab().begin(c_.grid.tp_rank()); }
  int64_t columns() const { return vocab().columns(c_.grid.tp_rank()); }
  int64_t valid_columns() const { return vocab().valid(c_.grid.tp_rank()); }
  double element_bytes() const { return static_cast<double>(size_of(c_.problem.type)); }
  /// Of an all-gather to which each rank gives so many bytes, and of an all-reduce.
  static SentTraffic all_gather_of(const Communicator& group, int64_t bytes);
  static SentTraffic all_reduce_of(const Communicator& group, int64_t bytes);
  /// The answers in the file of the inputs; null: compute them.
  const LogprobsReference* reference() const { return c_.inputs.reference(); }
  /// A whole row without padding, [vocab_size].
  std::vector<double> whole_row(int64_t token, TokenTensor tensor = TokenTensor::logits) const;
  /// Some of `tokens` rows (of this rank's): one of every `step` at a place that varies, the first
  /// and the last. Padding is left out. The same on all tensor-parallel ranks.
  std::vector<int64_t> sample(std::span<const int64_t> tokens) const;
  /// The check of one result; it passes when there is no token at all.
  Check& check_of(const std::string& label, const char* what, double tolerance,
                  Verification& checks) const;
  /// Of `rows` rows of this rank's columns, without padding.
  double shard_bytes(int64_t rows) const {
    return element_bytes() * static_cast<double>(rows * valid_columns());
  }
  /// Adds a check that the bits of `results` are the same on all ranks of the group.
  static void check_same_bits(const std::string& label, std::span<const float> results,
                              Communicator& group, Verification& checks);

  LogprobsContext& c_;
  bool upstream_;
  std::function<void()> forward_, backward_;

 private:
  HostRow host_row_;
};

/// What a gradient of one token's row is made of (logprobs/row_gradient.hpp).
struct RowGradientTerms {
  std::vector<double> logprobs;          ///< [vocab_size], of what survived
  double a = 0, b = 0;                   ///< of logprobs/row_gradient.hpp
  std::span<const int32_t> ids = {};     ///< with a gradient of their own
  std::span<const double> weights = {};  ///< theirs
  /// Scale of errors at every column: logit_gradient_scale().
  std::vector<double> scales() const;
};

/// Compares one value; where the definition gives NaN (a distribution over nothing), so must it.
template <class Where>
void add_value(Check& check, float actual, double want, const Where& where, double scale = 1) {
  if (!std::isnan(want))
    check.add(static_cast<double>(actual), want, where, scale);
  else if (std::isnan(actual))
    check.add_nothing();
  else
    check.add_failure(where());
}

/// Compares a shard's row, in host memory, with `want` [vocab_size], and padding with 0.
void add_gradient_row(Check& check, ConstMatrixRef d_logits, int64_t row, int64_t first_column,
                      std::span<const double> want, std::span<const double> scales, int64_t token);

struct LogprobsOperation {
  std::string name;
  std::string summary;
  bool upstream = false;  ///< NeMo RL's algorithm is there too
  bool backward = true;
  std::unique_ptr<LogprobsOp> (*make)(LogprobsContext& context, const std::string& name,
                                      bool upstream) = nullptr;
  /// Why the case does not admit it; empty: it does.
  std::string (*why_not)(const LogprobsWorkload& problem, const LogprobsOptions& options,
                         bool upstream) = nullptr;
  /// Matrices as large as the logits that a rank needs besides them and, for backward, a second:
  /// of their type, and of f32 by upstream's algorithm.
  double typed_matrices = 0;
  double upstream_matrices = 0;
};
const std::vector<LogprobsOperation>& logprobs_operations();
/// Throws a usage error that lists the names.
const LogprobsOperation& find_operation(const std::string& name);

// The adaptors, by file: report/logprobs_ops_*.cpp.
using MakeOp = std::unique_ptr<LogprobsOp>(LogprobsContext&, const std::string&, bool);
MakeOp make_softmax_op, make_score_op, make_soft_ce_op, make_raw_gather_op, make_distillation_op,
    make_top_k_op, make_filtered_op, make_packed_op, make_fused_linear_op, make_exchange_op;

}  // namespace gyre
