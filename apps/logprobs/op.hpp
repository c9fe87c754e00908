#pragma once
// A case of gyre-logprobs: an operation by one method. The classes in ops/ derive from this base.
// operation.hpp describes the entries of the registry.

#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "apps/logprobs/inputs.hpp"
#include "harness/case.hpp"
#include "harness/result_array.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "report/tolerance.hpp"

namespace gyre {

class LogprobsOp : public Case {
 public:
  explicit LogprobsOp(LogprobsContext& context) : c_(context) {}

  /// Creates the object of src/logprobs. Its memory counts as extra memory. Collective.
  virtual void start() = 0;
  bool has_backward() const { return static_cast<bool>(backward_); }
  /// Allocates the outputs of backward, which may share memory with inputs. Not timed.
  virtual void prepare_backward() {}
  /// Restores inputs that backward overwrote. Not timed.
  virtual void restore() {}
  /// Fills outputs with NaN.
  virtual void poison() = 0;
  /// Lower bound of this rank's memory traffic in bytes; NaN if it is negligible.
  virtual double ideal_bytes(Pass pass) const = 0;
  /// FLOPs of this rank; NaN if memory traffic is the limit.
  virtual double flops(Pass) const { return std::numeric_limits<double>::quiet_NaN(); }
  /// A note about the last call, or "".
  virtual std::string note() const { return ""; }
  /// Appends the results of the last call of `pass` to `output`, for --output. Keeps an array that
  /// is there already. Collective.
  void collect(Pass pass, std::vector<LogprobsPart>& output);
  void set_names(const std::string& op, const std::string& method) { names_ = op + ", " + method; }

  std::string label(Pass pass) const override;
  const char* run_word() const override { return "call"; }
  void begin(Pass) override { is_first_ = true; }
  void prepare(Pass pass, bool poisoned) override;
  /// Runs one call. A forward call must precede backward.
  void run(Pass pass) override;
  SentTraffic sent() const override;
  std::optional<uint64_t> checksum(Pass pass) override;
  /// Compares results(pass) one by one.
  void verify(Pass pass, Verification& checks) override;

 protected:
  /// The results of a call of `pass`.
  virtual std::vector<ResultArray> results(Pass) { return {}; }

  Communicator& tp() const { return c_.grid.tp(); }
  /// Communicator of the same ranks, for matrices.
  Communicator& tp_arrays() const { return c_.backend.arrays().tp(); }
  Stream& stream() const { return c_.backend.stream(); }
  /// Kernels for matrices; null selects the host's.
  RowKernels* kernels() const { return c_.backend.row_kernels(); }
  MemorySpace space() const { return c_.backend.space(); }
  double temperature() const { return c_.problem.filter.temperature; }
  ScoreOptions score_options(int64_t picks, bool entropy = false) const {
    return {picks, entropy, temperature(), c_.options.threads, kernels(), &tp_arrays()};
  }
  /// Row `row` of a result, on the host. Valid until the next call.
  ConstMatrixRef host_row(ConstMatrixRef matrix, int64_t row) {
    return host_row_.read(matrix, row, stream());
  }
  const VocabPartition& vocab() const { return c_.problem.vocab; }
  int64_t first_column() const { return vocab().begin(c_.grid.tp_rank()); }
  int64_t columns() const { return vocab().columns(c_.grid.tp_rank()); }
  int64_t valid_columns() const { return vocab().valid(c_.grid.tp_rank()); }
  double element_bytes() const { return size_of(c_.problem.type); }
  /// Traffic that a rank sends in a collective. `bytes` is each rank's contribution to an
  /// all-gather, and the buffer size of an all-reduce or reduce-scatter.
  static SentTraffic all_gather_of(const Communicator& group, int64_t bytes);
  static SentTraffic all_reduce_of(const Communicator& group, int64_t bytes);
  static SentTraffic reduce_scatter_of(const Communicator& group, int64_t bytes);
  /// Element `place` of an answer array, and row `token` of a [tokens, vocab_size] one. Empty if
  /// there is no such array.
  std::optional<double> answer(const std::string& name, int64_t place) const;
  std::span<const double> answer_row(const std::string& name, int64_t token) const;
  bool takes_any_of_ties() const { return c_.options.ties == "any"; }
  /// An array of `values` [rows, width] that all tensor-parallel ranks hold; only the first reports
  /// its rows. Width 0 means one number per token: [tokens].
  template <class T>
  ResultArray shared_array(const char* name, const char* check, double tolerance,
                           std::span<const int64_t> tokens, std::span<const T> values,
                           int64_t width) const;
  /// A gradient [tokens, vocab_size]; every rank holds its own columns.
  ResultArray gradient_array(const char* name, std::span<const int64_t> tokens, MatrixRef d_logits);
  void read_row(ConstMatrixRef matrix, size_t row, std::span<double> to);
  /// A whole input row without padding, [vocab_size].
  std::vector<double> whole_row(int64_t token, TokenTensor tensor = TokenTensor::logits) const;
  /// Number of rows that this rank samples (--check-tokens).
  int64_t sample_rows() const {
    return std::max<int64_t>(1, c_.options.check_tokens / c_.grid.shape().cp);
  }
  /// The check of one result, which passes if there are no tokens.
  Check& check_of(Pass pass, const char* what, double tolerance, Verification& checks) const {
    return gyre::check_of(label(pass), what, tolerance, c_.problem.tokens(), checks);
  }
  /// Bytes of `rows` rows of this rank's columns, without padding.
  double shard_bytes(int64_t rows) const {
    return element_bytes() * static_cast<double>(rows * valid_columns());
  }
  /// Adds a check that `results` are bitwise equal on all ranks of the group.
  void check_same_bits(std::span<const float> results, Communicator& group,
                       Verification& checks) const;

  LogprobsContext& c_;
  std::function<void()> forward_, backward_;

 private:
  /// results(pass), with the file's answers attached.
  std::vector<ResultArray> answered_results(Pass pass);
  /// The file's answers for an array; empty if there are none.
  std::vector<double> answers_to(const ResultArray& array);

  std::string names_;
  bool is_first_ = true;  // no forward call has been made for this pass
  HostRow host_row_;
};

/// An operation on rows of logits. Its results are outputs(), which a forward call makes equal on
/// all tensor-parallel ranks.
class RowsOp : public LogprobsOp {
 public:
  RowsOp(LogprobsContext& context, LogprobsRows& rows) : LogprobsOp(context), rows_(rows) {}
  explicit RowsOp(LogprobsContext& context) : RowsOp(context, context.in_order()) {}

  void prepare_backward() override { rows_.prepare_gradient(); }
  void restore() override { rows_.restore(); }
  void poison() override;
  void verify(Pass pass, Verification& checks) override;

 protected:
  virtual std::vector<std::span<float>> outputs() { return {}; }
  int64_t token(int64_t r) const { return rows_.tokens()[r]; }
  std::vector<double> row_of(size_t r) const { return whole_row(rows_.tokens()[r]); }

  LogprobsRows& rows_;
};

/// Terms of the gradient of one token's row (logprobs/row_gradient.hpp).
struct RowGradientTerms {
  std::vector<double> logprobs;          ///< [vocab_size], among the ids that survive
  double a = 0, b = 0;                   ///< coefficients of logprobs/row_gradient.hpp
  std::span<const int32_t> ids = {};     ///< ids with a gradient term of their own
  std::span<const double> weights = {};  ///< the terms of `ids`
  /// Error scale at every column: logit_gradient_scale().
  std::vector<double> scales() const;
};

template <class T>
ResultArray LogprobsOp::shared_array(const char* name, const char* check, double tolerance,
                                     std::span<const int64_t> tokens, std::span<const T> values,
                                     int64_t width) const {
  ResultArray array{name, {c_.problem.tokens()}, check, tolerance};
  if (width > 0) array.shape.push_back(width);
  array.columns = array.width();
  array.whole_numbers = std::is_integral_v<T>;
  if (c_.grid.tp_rank() == 0) array.rows.assign(tokens.begin(), tokens.end());
  array.read = read_rows(array.columns, [values](size_t r, std::span<double> to) {
    for (size_t k = 0; k < to.size(); ++k) to[k] = static_cast<double>(values[r * to.size() + k]);
  });
  return array;
}

}  // namespace gyre
