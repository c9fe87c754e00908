#pragma once
// An operation of gyre-logprobs as the app runs it: one interface for whatever src/logprobs can do,
// and what the adaptors in ops/ share. operation.hpp says what an operation is made of.

#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "apps/logprobs/context.hpp"
#include "apps/logprobs/result_array.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "report/tolerance.hpp"
#include "report/verify.hpp"

namespace gyre {

/// What a rank sends in one call, on all communicators of the backend's grids together.
struct SentTraffic {
  int64_t messages = 0;
  int64_t bytes = 0;
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
  /// Adds what the last call of `pass` left to that of other operations, for a file. An array that
  /// is there already stays. Collective.
  void collect(Pass pass, std::vector<LogprobsPart>& output);
  /// Compares what the last call of `pass` left: results with the answers of the file, in full, or
  /// with the definition, of a sample. `label` begins the names of checks. Collective.
  virtual void verify(Pass pass, const std::string& label, Verification& checks);

 protected:
  /// What a call of `pass` leaves.
  virtual std::vector<ResultArray> results(Pass) { return {}; }

  Communicator& tp() const { return c_.grid.tp(); }
  /// The same ranks, for matrices.
  Communicator& tp_arrays() const { return c_.backend.arrays().tp(); }
  Stream& stream() const { return c_.backend.stream(); }
  /// Of matrices; null: the host's.
  RowKernels* kernels() const { return c_.backend.row_kernels(); }
  MemorySpace space() const { return c_.backend.space(); }
  double temperature() const { return c_.problem.filter.temperature; }
  /// For `picks` ids a row, with entropies or without.
  ScoreOptions score_options(int64_t picks, bool entropy = false) const {
    return {picks, entropy, temperature(), c_.options.threads, kernels(), &tp_arrays()};
  }
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
  /// The answers to an array in the file of the inputs, which count as compared; empty: there are
  /// none. (An array without elements has none, and needs none.)
  std::vector<double> answers_to(const ResultArray& array) const;
  /// Element `place` of an array of answers; row `token` of one of [tokens, vocab_size]. Nothing
  /// where there is no such array.
  std::optional<double> answer(const std::string& name, int64_t place) const;
  std::span<const double> answer_row(const std::string& name, int64_t token) const;
  bool takes_any_of_ties() const { return c_.options.ties == "any"; }
  /// `tokens` on the rank that shows results which all tensor-parallel ranks have alike; none on
  /// the others.
  std::vector<int64_t> shown_once(std::span<const int64_t> tokens) const;
  /// An array of `values` [rows, width], which all tensor-parallel ranks have alike. Width 0: a
  /// number a token, [tokens].
  template <class T>
  ResultArray shared_array(const char* name, const char* check, double tolerance,
                           std::span<const int64_t> tokens, std::span<const T> values,
                           int64_t width) const;
  /// A gradient [tokens, vocab_size] of which every rank has its columns.
  ResultArray gradient_array(const char* name, std::span<const int64_t> tokens, MatrixRef d_logits);
  /// A whole row without padding, [vocab_size].
  std::vector<double> whole_row(int64_t token, TokenTensor tensor = TokenTensor::logits) const;
  /// Some of `tokens` rows (of this rank's): one of every `step` at a place that varies, the first
  /// and the last. Padding is left out. The same on all tensor-parallel ranks.
  std::vector<size_t> sample(std::span<const int64_t> tokens) const;
  /// The check of one result; it passes when there is no token at all.
  Check& check_of(const std::string& label, const std::string& what, double tolerance,
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
  void compare(const ResultArray& array, const std::string& label, Verification& checks) const;
  /// Of an array with answers all; else a sample, which is noted in `check`.
  std::vector<size_t> rows_to_compare(const ResultArray& array, bool answered, Check& check) const;

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

/// Compares row `index` of an array: `got` [array.columns] with `expected`, or with its `answer`
/// [width], if that is not null. What is undefined must be NaN.
void compare_row(const ResultArray& array, size_t index, std::span<const double> got,
                 const ExpectedRow& expected, const double* answer, Check& check);

template <class T>
ResultArray LogprobsOp::shared_array(const char* name, const char* check, double tolerance,
                                     std::span<const int64_t> tokens, std::span<const T> values,
                                     int64_t width) const {
  ResultArray array{name, {c_.problem.tokens()}, check, tolerance};
  if (width > 0) array.shape.push_back(width);
  array.columns = array.width();
  array.whole_numbers = std::is_integral_v<T>;
  array.rows = shown_once(tokens);
  array.read = read_rows(array.columns, [values](size_t r, std::span<double> to) {
    for (size_t k = 0; k < to.size(); ++k) to[k] = static_cast<double>(values[r * to.size() + k]);
  });
  return array;
}

}  // namespace gyre
