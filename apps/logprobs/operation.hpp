#pragma once
// Registry entries of gyre-logprobs operations. An operation's entry and adaptor hold everything
// that distinguishes it. The code that measures and reports reads these and tests no names.
//
// To add an operation, add a file to ops/ and a line to the list in registry.cpp. The file has
//
//     the adaptor, a LogprobsOp       calls src/logprobs, checks the results against a definition
//                                     in double precision, and gives the messages and bytes of a
//                                     call in closed form
//     NAME_operation()                returns the entry

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/logprobs/op.hpp"

namespace gyre {

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

/// Inputs that an operation reads besides logits and targets. A file may lack them.
struct InputNeeds {
  bool ids = false;             ///< --picks ids per token
  bool teacher = false;         ///< whole rows of a teacher's logits
  bool teacher_values = false;  ///< a teacher's logits of the ids
  bool hidden = false;          ///< hidden states and the head weight
};

/// The run and the rank whose memory is planned.
struct MemoryCase {
  const LogprobsWorkload& problem;
  const LogprobsOptions& options;
  int tp_rank = 0;

  /// Largest number of tokens on any context-parallel rank.
  double tokens() const { return static_cast<double>(ceil_div(problem.tokens(), options.cp)); }
  double columns() const { return static_cast<double>(problem.vocab.columns(tp_rank)); }
  double element_bytes() const { return size_of(problem.type); }
};

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
