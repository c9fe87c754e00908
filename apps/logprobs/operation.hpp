#pragma once
// Registry entries of gyre-logprobs operations. An operation's entry and adaptor hold everything
// that distinguishes it. The code that measures and reports reads these and tests no names.
//
// Operations on the statistics of rows are entries of src/logprobs/operations/list.hpp, which
// row_operation.cpp adapts. To add an operation with a pass of its own, add a file to ops/ and a line
// to the list in registry.cpp. The file has
//
//     the adaptor, a LogprobsOp       calls src/logprobs, checks the results against a definition
//                                     in double precision, and gives the messages and bytes of a
//                                     call in closed form
//     NAME_operation()                returns the entry

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "apps/logprobs/inputs.hpp"
#include "harness/case.hpp"
#include "harness/result_array.hpp"
#include "logprobs/tolerance.hpp"
#include "logprobs/vocab_parallel.hpp"

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
  /// Communicator of the tensor-parallel ranks, for matrices.
  Communicator& tp_arrays() const { return c_.backend.arrays().tp(); }
  Stream& stream() const { return c_.backend.stream(); }
  /// Kernels for matrices; null selects the host's.
  RowKernels* kernels() const { return c_.backend.row_kernels(); }
  MemorySpace space() const { return c_.backend.space(); }
  SamplingFilter filter(int64_t token) const { return c_.filter(token); }
  double temperature(int64_t token) const { return filter(token).temperature; }
  /// Options for scores of rows of these tokens. Valid until the next call.
  ScoreOptions score_options(std::span<const int64_t> tokens, int64_t picks, bool entropy = false);
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
  /// Bytes of `rows` rows of this rank's columns, without padding.
  double shard_bytes(int64_t rows) const { return element_bytes() * (rows * valid_columns()); }
  /// Log-probabilities and their error scales.
  static ExpectedRow scored(std::vector<double> logprobs);
  /// Gradient of a token's whole row of logits, from gradients g of the log-probabilities of `ids`
  /// and h of the entropy. `rounds_terms`: each term is rounded, not only their sum, and many may
  /// cancel.
  ExpectedRow score_gradient(int64_t token, std::span<const int32_t> ids,
                             const std::vector<double>& g, double h = 0,
                             bool rounds_terms = false) const;
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
  std::vector<double> temperatures_;  // of score_options()
  bool is_first_ = true;              // no forward call has been made for this pass
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
  /// Forward reads the rows; backward also writes those that have a gradient.
  double ideal_bytes(Pass pass) const override;
  void verify(Pass pass, Verification& checks) override;

 protected:
  virtual std::vector<std::span<float>> outputs() { return {}; }
  /// Whether the gradient of row r is not 0.
  virtual bool has_gradient([[maybe_unused]] int64_t r) const { return true; }
  int64_t active_rows() const;
  int64_t token(int64_t r) const { return rows_.tokens()[r]; }
  std::vector<double> row_of(int64_t r) const { return whole_row(token(r)); }
  /// Log-probabilities [rows, width]; expect(r) gives row r by the definition.
  template <class Expect>
  ResultArray row_values(const char* name, const char* check, std::span<const float> values,
                         int64_t width, const Expect& expect) const {
    ResultArray array =
        shared_array<float>(name, check, logprob_tolerance(), rows_.tokens(), values, width);
    array.expect = expect_rows(expect);
    return array;
  }
  /// The gradient of the logits.
  template <class Expect>
  ResultArray row_gradient(const char* name, const Expect& expect) {
    ResultArray array = gradient_array(name, rows_.tokens(), rows_.d_logits());
    array.expect = expect_rows(expect);
    return array;
  }

  LogprobsRows& rows_;
};

/// Terms of the gradient of one token's row (logprobs/rows/row_gradient.hpp).
struct RowGradientTerms {
  std::vector<double> logprobs;          ///< [vocab_size], among the ids that survive
  double a = 0, b = 0;                   ///< coefficients of logprobs/rows/row_gradient.hpp
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
    for (size_t k = 0; k < to.size(); ++k) to[k] = values[r * to.size() + k];
  });
  return array;
}

/// Memory access pattern of a pass over the rows of a shard. The pass's rate is compared with the
/// rate of a loop that only does these accesses.
enum class RowTraffic {
  reads,     ///< reads the rows
  updates,   ///< reads the rows and overwrites them; --out-of-place: writes another matrix
  copies,    ///< reads the rows and writes another matrix of their size
  writes,    ///< writes rows without reading any
  products,  ///< multiplies matrices; the FMA rate is the limit
};

/// When an operation's rate is a figure of merit.
enum class RateShown {
  always,
  headline,        ///< always; suppresses the figures of `if_no_headline` operations
  if_no_headline,  ///< if no headline operation runs and this is the first one that runs
};

/// The figure of merit of an operation's rate.
struct RateFigure {
  RateShown shown = RateShown::if_no_headline;
  std::string metric = "logits_rate";
  std::string unit = "GB/s/rank";
};

/// Numbers of matrices as large as a rank's logits that an operation needs besides the logits.
struct MatrixNeeds {
  double always = 0;    ///< in the logits' type
  double output = 0;    ///< in the output type (--f32-output)
  double d_output = 0;  ///< gradients of results, in the output type, if backward runs
  double backward = 1;  ///< in the logits' type, if backward runs: the gradient or, in place, a
                        ///< copy of the logits
};

/// Names of inputs, besides logits and targets, that an operation reads: it needs one of each list.
using InputNeeds = std::vector<std::vector<std::string>>;

/// The run and the rank whose memory is planned.
struct MemoryCase {
  const LogprobsWorkload& problem;
  const LogprobsOptions& options;
  int tp_rank = 0;

  /// Largest number of tokens on any context-parallel rank.
  double tokens() const { return ceil_div(problem.tokens(), options.cp); }
  double columns() const { return problem.vocab.columns(tp_rank); }
  double element_bytes() const { return size_of(problem.type); }
};

/// The input with the upstream gradients of result `i` of a token (LogprobsInputs::gradient).
inline std::string gradient_input(int64_t i) {
  return i == 0 ? "d_value" : i == 1 ? "d_entropies" : "d_ids";
}

/// Inputs that most gradients depend on (LogprobsArray::reads).
inline std::vector<std::string> gradient_inputs() {
  return {"logits", "d_value"};
}

/// A way to compute an operation. Each method is a separate case.
struct LogprobsMethod {
  std::string name;  ///< --method value: gyre, or upstream for NeMo RL's algorithm
  std::function<std::unique_ptr<LogprobsOp>(LogprobsContext& context)> make;
  double f32_matrices = 0;  ///< f32 matrices as large as a rank's logits, besides MatrixNeeds
  /// Returns why the method does not support the workload; empty if it does.
  std::function<std::string(const LogprobsWorkload& problem, const LogprobsOptions& options)>
      why_not = [](const LogprobsWorkload&, const LogprobsOptions&) { return ""; };
};

/// Returns a factory that creates an Op from a context and these arguments.
template <class Op, class... Args>
auto makes(Args... args) {
  return [=](LogprobsContext& context) { return std::make_unique<Op>(context, args...); };
}

/// The registry entry of an operation.
struct LogprobsOperation {
  std::string name = "";     ///< --op value
  std::string summary = "";  ///< what it computes
  /// Source of expected results, in double precision: a routine of logprobs/reference.hpp, or the
  /// inputs themselves.
  std::string definition = "";
  std::vector<LogprobsMethod> methods = {};  ///< gyre's method first
  RowTraffic forward = RowTraffic::reads;
  std::optional<RowTraffic> backward = {};  ///< empty if there is no backward pass
  MatrixNeeds matrices = {};
  std::vector<std::string> own_options = {};  ///< options that not every operation reads
  InputNeeds needs = {};
  std::vector<LogprobsArray> arrays = {};  ///< its results and gradients in files
  RateFigure figure = {};
  /// Matrix bytes of an operation that works without logits. If empty, `matrices` applies.
  std::function<double(const MemoryCase& run)> bytes_without_logits = {};

  bool has_backward() const { return backward.has_value(); }
  bool has_upstream() const { return methods.size() > 1; }
  RowTraffic traffic(Pass pass) const { return pass == Pass::forward ? forward : *backward; }
  bool reads(const std::string& option) const;
};

/// An operation and the method that computes it. Each case is made from one.
struct LogprobsRun {
  const LogprobsOperation& operation;
  const LogprobsMethod& method;

  /// Bytes that a rank needs, including generated inputs and outputs.
  int64_t planned_bytes(const LogprobsWorkload& problem, const LogprobsOptions& o, int rank) const;
  /// Returns why it cannot run: an input is missing, the method refuses the workload, or `rank` of
  /// the world needs more than `memory_bytes` (0 if unknown). Empty if it can run.
  std::string why_not(const LogprobsWorkload& problem, const LogprobsOptions& o,
                      int64_t memory_bytes, int rank) const;
  std::unique_ptr<LogprobsOp> make(LogprobsContext& context) const;
  /// The passes that the options select and the operation has.
  std::vector<Pass> passes(const LogprobsOptions& o) const;
};

/// The runs that the options select, in the order of the table.
std::vector<LogprobsRun> runs_of(const LogprobsOptions& o);

}  // namespace gyre
