#pragma once
// Inputs of gyre-logprobs: tokens in sequences. Each token has rows of student and teacher logits,
// ids, and gradients. Every rank can generate any part of any row:
//
//     logits of token t   scale · normal(seed, t, column), plus `height` at the token's peaks:
//                         columns that seed and t determine
//     target of token t   one of its peaks with probability 3/4, else a uniformly random id
//     ids of token t      its peaks, then uniformly random ids
//     teacher             other normal numbers, the same peaks
//     kept ids            the first of `ids`, as many as a random number says, without repetitions;
//                         with the target in 7 of 8 rows that keep some
//     projection          to --picks columns; each has up to 7 entries, at random ids
//     filters             with --filter-per-token: as at RandomInputs::filter
//     gradients           normal numbers, or 0 for a fraction of the tokens (--zero-fraction);
//                         the same for log-softmax, which has a gradient for every id

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "apps/logprobs/logit_matrix.hpp"
#include "apps/logprobs/options.hpp"
#include "comm/process_grid.hpp"
#include "core/sparse_matrix.hpp"
#include "core/token_random.hpp"
#include "harness/backend.hpp"
#include "io/schemas/logprobs_file.hpp"
#include "logprobs/fused_linear/fused_linear_ops.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

struct LogprobsWorkload {
  std::vector<int64_t> offsets{0};  ///< [sequences + 1], in tokens
  VocabPartition vocab;
  DType type = DType::f32;         ///< type of the logits, to which values are rounded
  DType output_type = DType::f32;  ///< type of (log-)softmax results and of gradients of all ids
  int64_t picks = 1;               ///< K, ids per token; 0 if there are none
  int64_t top = 1;                 ///< number of largest logits listed for each row
  std::set<std::string> inputs;    ///< those of logprobs_inputs() that there are
  /// Inputs that are there and cannot be scored, with the reason.
  std::map<std::string, std::string> refused;
  int64_t hidden = 1;     ///< D, elements of a hidden state
  SamplingFilter filter;  ///< of all tokens; its temperature applies to all scores
  /// Names of the parameters (temperature, top_k, top_p, min_p) that differ between tokens;
  /// LogprobsInputs::filter has them.
  std::vector<std::string> of_tokens;
  int64_t projected = 0;  ///< columns of the projection; 0 if there is none
  std::string origin;     ///< source of the workload, for the report

  bool per_token() const { return !of_tokens.empty(); }
  int64_t tokens() const { return offsets.back(); }
  int64_t sequences() const { return std::ssize(offsets) - 1; }
  int64_t length(int64_t i) const { return offsets[i + 1] - offsets[i]; }
  int64_t longest() const;
};

/// Hidden states and the weight of a head, whose product is the logits: logits[t, v] = Σ_d
/// hidden[t, d] · head[v, d].
struct LinearFactors {
  int64_t width = 0;              ///< elements of a hidden state, D
  std::span<const float> hidden;  ///< [tokens, D]
  std::span<const float> head;    ///< [vocab_size, D]

  /// Largest norm of a row of a factor.
  double norm(std::span<const float> factor) const;
  /// Largest norm of a hidden state times largest norm of a row of the head, over √D: the root mean
  /// square of the logits if all vectors had these norms and random directions.
  double logit_size() const;
};

/// Input rows. Every rank can read any part of any row.
class LogprobsInputs {
 public:
  virtual ~LogprobsInputs() = default;
  /// Columns [first, first + to.size()) of a token's logits, rounded to the workload's type.
  /// `tensor` is logits or teacher. No caller may read the values of padding columns.
  virtual void row(TokenTensor tensor, int64_t token, int64_t first, std::span<float> to) const = 0;
  /// The id that the token's row scores. For packed sequences, it is also the token's own id.
  virtual int32_t target(int64_t token) const = 0;
  /// to <- the token's row of an input of floats [tokens] or [tokens, K], which the workload has.
  /// If the teacher's row replaces the input, these are the teacher's logits of the token's ids.
  virtual void row_of_input(const std::string& name, int64_t token, std::span<float> to) const = 0;
  /// to [K] <- the ids to score in the token's row.
  virtual void ids(int64_t token, std::span<int32_t> to) const = 0;
  /// The ids that a sampler kept in the token's row: different ones, perhaps none.
  virtual std::vector<int32_t> kept(int64_t token) const = 0;
  /// The projection of the vocabulary to other columns; no gradients.
  virtual SparseMatrix projection() const = 0;
  /// to [columns of the projection] <- upstream gradients of the token's projected probabilities.
  virtual void d_projected(int64_t token, std::span<float> to) const = 0;
  /// The token's own temperature and filter, if the workload has one for each.
  virtual SamplingFilter filter(int64_t token) const = 0;
  /// Upstream gradient of the token's result `i`: 0 is its log-probability (or cross entropy), 1
  /// its entropy, 2 + k the value of id k.
  virtual float gradient(int64_t token, int64_t i) const = 0;
  /// Gradients of the log-probabilities of ids [first, first + to.size()), rounded to the
  /// workload's output type. No caller may read the values of padding columns.
  virtual void d_logprobs(int64_t token, int64_t first, std::span<float> to) const = 0;
  /// Hidden states and head weight of the inputs, in f32, if they are stored.
  virtual std::optional<LinearFactors> linear() const { return {}; }
  /// The named array of reference answers for these inputs; null if there is none.
  virtual const std::vector<double>* answers(const std::string&) const { return nullptr; }
  /// Name of a dataset that the named answers depend on and that the run rounds, so that they do
  /// not apply; "" if there is none.
  virtual std::string rounded_input_of(const std::string&) const { return ""; }

 protected:
  /// to <- the teacher's logits of the token's ids.
  void teacher_at_ids(int64_t token, std::span<float> to) const;
};

/// `tokens` tokens in --sequences sequences, or one pack of documents that --gen generates. Throws
/// a usage error if --gen is invalid.
LogprobsWorkload generated_workload(const LogprobsOptions& o, int64_t tokens);
/// The file's workload. Sets the vocabulary, filter and temperature in `o` from it. Throws a usage
/// error if --shards contradicts it, or if --hidden is given.
LogprobsWorkload workload_of(const LogprobsFile& file, LogprobsOptions& o);

std::unique_ptr<LogprobsInputs> random_inputs(const LogprobsWorkload& problem,
                                              const LogprobsOptions& o);
/// Inputs of `file`, which must outlive them. Rounds to `type`, and d_logprobs to `output_type`
/// (`type` by default). Omits answers that depend on inputs that are rounded here or by the reader.
std::unique_ptr<LogprobsInputs> inputs_of(const LogprobsFile& file, DType type,
                                          std::optional<DType> output_type = {});

/// Fills row r with the logits of tokens[r] from column `first` on. A negative token marks a
/// padding row, which becomes NaN. Complete on return.
void fill_logits(const LogprobsInputs& inputs, TokenTensor tensor, std::span<const int64_t> tokens,
                 int64_t first, MatrixRef to, Stream& stream);

/// Rows of logits on one rank, with the ids to score in each row.
class LogprobsRows {
 public:
  /// tokens [rows] holds the token of each row, negative for padding. Keeps matrices in the memory
  /// space of `stream`, and fills and copies them in its order.
  LogprobsRows(const LogprobsWorkload& problem, const LogprobsInputs& inputs,
               std::vector<int64_t> tokens, int tp_rank, bool in_place, Stream& stream);

  int64_t rows() const { return std::ssize(tokens_); }
  std::span<const int64_t> tokens() const { return tokens_; }
  MatrixRef logits() { return logits_.ref(); }
  /// Output of backward; in place, this is the logits' memory. Requires prepare_gradient().
  MatrixRef d_logits() { return in_place_ ? logits_.ref() : second_.ref(); }
  /// Allocates a second matrix for the gradient. In place, it is instead a copy of the logits, and
  /// later calls restore the logits from it.
  void prepare_gradient();
  /// Restores the logits if a gradient may have overwritten them.
  void restore();
  /// Fills the gradient with NaN, unless it is in place.
  void poison();
  /// Fills d_logits() with NaN, in place or not. Requires prepare_gradient().
  void clobber();
  /// Teacher logits, filled on first use.
  MatrixRef teacher();
  /// Gradient of the log-probabilities of all ids, in the output type. Filled on first use.
  MatrixRef d_logprobs();
  std::span<const int32_t> targets() const { return targets_.span(); }  ///< [rows]
  std::span<const int32_t> ids() const { return ids_.span(); }          ///< [rows, picks]
  /// [rows, count] upstream gradients of results [first, first + count) of each row, numbered as in
  /// LogprobsInputs::gradient; 0 for padding.
  std::vector<float> gradients(int64_t first, int64_t count = 1) const;

 private:
  Stream& stream_;
  const LogprobsInputs& inputs_;
  std::vector<int64_t> tokens_;
  int64_t first_column_;
  DType output_type_;
  bool in_place_, has_second_ = false, has_teacher_ = false, has_d_logprobs_ = false;
  LogitMatrix logits_;
  LogitMatrix second_;  // the gradient; in place, a copy of the logits
  LogitMatrix teacher_, d_logprobs_;
  Buffer<int32_t> targets_, ids_;
};

class LogprobsBackend {
 public:
  /// Computes on the host and uses one grid for all communication.
  explicit LogprobsBackend(ProcessGrid& grid);
  /// Computes on `backend`. Collective over all ranks.
  LogprobsBackend(Backend& backend, const GridShape& shape);

  /// Memory space of logits, gradients, hidden states and weights.
  MemorySpace space() const { return stream_.space(); }
  /// Stream that orders all reads and writes of these arrays.
  Stream& stream() { return stream_; }
  /// Process grid for the few numbers of each row, in host memory.
  ProcessGrid& grid() { return grid_; }
  /// The same grid for arrays as large as logits or hidden states, in memory of space().
  ProcessGrid& arrays() { return arrays_; }
  RowKernels* row_kernels() { return row_kernels_.get(); }
  LinearOps* linear_ops() { return linear_ops_.get(); }

 private:
  HostStream host_;
  std::unique_ptr<ProcessGrid> own_grid_, own_arrays_;
  ProcessGrid& grid_;
  ProcessGrid& arrays_;
  Stream& stream_;
  std::unique_ptr<RowKernels> row_kernels_;
  std::unique_ptr<LinearOps> linear_ops_;
};

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
  ProcessGrid& grid;                    ///< backend.grid(), for host memory
  std::set<std::string> compared = {};  ///< answer arrays that results were compared with

  /// Temperature and filter of a token; a negative one, of a padding row, has the run's.
  SamplingFilter filter(int64_t token) const {
    return token < 0 || !problem.per_token() ? problem.filter : inputs.filter(token);
  }
  /// Filters of the rows of these tokens; empty if all tokens have the same one.
  std::vector<SamplingFilter> filters(std::span<const int64_t> tokens) const;
  std::vector<double> temperatures(std::span<const int64_t> tokens) const;
  /// Tokens of this rank when context-parallel ranks get contiguous, balanced blocks of them.
  std::vector<int64_t> tokens_in_order() const;
  /// Rows of tokens_in_order(), with the logits restored.
  LogprobsRows& in_order();
  /// Rows under --layout, for packed sequences. Rebuilds them and replaces the current rows.
  LogprobsRows& by_layout(std::vector<int64_t> tokens);
  /// Frees the memory of the rows.
  void release() { rows_ = nullptr; }

 private:
  std::unique_ptr<LogprobsRows> rows_;
  bool ordered_ = false;
};

}  // namespace gyre
