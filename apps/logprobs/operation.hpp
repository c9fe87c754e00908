#pragma once
// What gyre-logprobs knows of an operation. Everything that distinguishes one operation from
// another stands in its entry and its adaptor: the code that measures and reports reads these, and
// never a name.
//
// Adding one = a file in ops/, and a line in the list of registry.cpp. The file has
//
//     the adaptor, a LogprobsOp       calls src/logprobs, checks the results against a definition
//                                     in double precision, and gives messages and bytes of a call
//                                     in closed form
//     NAME_operation()                the entry

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/logprobs/op.hpp"

namespace gyre {

/// What a pass does in memory with the rows of a shard: its rate is compared with that of a loop
/// that does the same and nothing else.
enum class RowTraffic {
  reads,     ///< reads them
  updates,   ///< reads them and writes as much in their place; elsewhere with --out-of-place
  copies,    ///< reads them and writes as much elsewhere
  writes,    ///< writes rows without reading any
  products,  ///< multiplies matrices: the limit is that of FMAs
};

/// Which calls of an operation have a figure of merit for their rate.
enum class RateShown {
  always,
  headline,        ///< always, and then `if_no_headline` ones have none
  if_no_headline,  ///< if no headline operation runs, and this one is the first that does
};

/// The figure of merit of an operation's rate.
struct RateFigure {
  RateShown shown = RateShown::if_no_headline;
  std::string metric = "logits_rate";
  std::string unit = "GB/s/rank";
};

/// Matrices as large as a rank's logits that an operation needs besides them.
struct MatrixNeeds {
  double always = 0;    ///< of the logits' type
  double output = 0;    ///< of the output type (--f32-output)
  double d_output = 0;  ///< likewise, if backward is run: gradients of results
  double backward = 1;  ///< of the logits' type, if backward is run: the gradient or, in place, a
                        ///< copy of the logits
};

/// What an operation reads beside logits and targets, which a file may lack.
struct InputNeeds {
  bool ids = false;             ///< --picks ids a token
  bool teacher = false;         ///< whole rows of a teacher's logits
  bool teacher_values = false;  ///< a teacher's logits of the ids
  bool hidden = false;          ///< hidden states and the weight of a head
};

/// The rank whose memory is planned.
struct MemoryCase {
  const LogprobsWorkload& problem;
  const LogprobsOptions& options;
  int tp_rank = 0;

  /// Tokens of the context-parallel rank that has most.
  double tokens() const { return static_cast<double>(ceil_div(problem.tokens(), options.cp)); }
  double columns() const { return static_cast<double>(problem.vocab.columns(tp_rank)); }
  double element_bytes() const { return static_cast<double>(size_of(problem.type)); }
};

/// The inputs that most gradients depend on (LogprobsArray::reads).
inline std::vector<std::string> gradient_inputs() {
  return {"logits", "d_value"};
}

/// A way to compute an operation: each is a case of its own.
struct LogprobsMethod {
  std::string name;  ///< of --method: gyre, or upstream for NeMo RL's algorithm
  std::function<std::unique_ptr<LogprobsOp>(LogprobsContext& context)> make;
  double f32_matrices = 0;  ///< as large as a rank's logits, that it needs besides MatrixNeeds
  /// Why the case does not admit it; empty: it does.
  std::function<std::string(const LogprobsWorkload& problem, const LogprobsOptions& options)>
      why_not = [](const LogprobsWorkload&, const LogprobsOptions&) { return ""; };
};

/// Makes an Op from a context and these arguments.
template <class Op, class... Args>
auto makes(Args... args) {
  return [=](LogprobsContext& context) { return std::make_unique<Op>(context, args...); };
}

/// The entry of an operation.
struct LogprobsOperation {
  std::string name = "";     ///< of --op
  std::string summary = "";  ///< what it computes
  /// What results are checked against, in double precision: a routine of logprobs/reference.hpp, or
  /// the inputs themselves.
  std::string definition = "";
  std::vector<LogprobsMethod> methods = {};   ///< gyre's first
  RowTraffic forward = RowTraffic::reads;     ///< what a forward pass does
  std::optional<RowTraffic> backward = {};    ///< likewise; nothing: there is no backward pass
  MatrixNeeds matrices = {};                  ///< what it needs beside logits
  std::vector<std::string> own_options = {};  ///< those that others do not read
  InputNeeds needs = {};                      ///< beside logits and targets
  std::vector<LogprobsArray> arrays = {};     ///< its results and gradients in files
  RateFigure figure = {};                     ///< of its rate
  /// Bytes of the matrices, of an operation that works without logits; none: as `matrices` says.
  std::function<double(const MemoryCase& run)> bytes_without_logits = {};

  bool has_backward() const { return backward.has_value(); }
  bool has_upstream() const { return methods.size() > 1; }
  RowTraffic traffic(Pass pass) const { return pass == Pass::forward ? forward : *backward; }
  bool reads(const std::string& option) const;
};

/// An operation by one of its methods: what a case is made from.
struct LogprobsRun {
  const LogprobsOperation& operation;
  const LogprobsMethod& method;

  /// Bytes that a rank needs, made-up inputs and outputs included.
  int64_t planned_bytes(const LogprobsWorkload& problem, const LogprobsOptions& o, int rank) const;
  /// Why it cannot be run here: the case does not admit it, or it needs more memory than
  /// `memory_bytes` (0: unknown) on `rank` of the world. Empty: it can.
  std::string why_not(const LogprobsWorkload& problem, const LogprobsOptions& o,
                      int64_t memory_bytes, int rank) const;
  std::unique_ptr<LogprobsOp> make(LogprobsContext& context) const;
  /// Passes of the options that the operation has.
  std::vector<Pass> passes(const LogprobsOptions& o) const;
};

/// The runs that the options want, in the order of the table.
std::vector<LogprobsRun> runs_of(const LogprobsOptions& o);

}  // namespace gyre
