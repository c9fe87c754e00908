#pragma once
// An operation of gyre-logprobs as the app runs it: one interface for whatever src/logprobs can do,
// and what the adaptors in ops/ share. operation.hpp says what an operation is made of.

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/logprobs/context.hpp"
#include "report/tolerance.hpp"
#include "report/verify.hpp"

namespace gyre {

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
  /// Puts results of the last forward pass where --output wants them; of operations that say so.
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
  /// Of an all-gather to which each rank gives so many bytes; of an all-reduce and of a
  /// reduce-scatter of so many on each rank.
  static SentTraffic all_gather_of(const Communicator& group, int64_t bytes);
  static SentTraffic all_reduce_of(const Communicator& group, int64_t bytes);
  static SentTraffic reduce_scatter_of(const Communicator& group, int64_t bytes);
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

}  // namespace gyre
