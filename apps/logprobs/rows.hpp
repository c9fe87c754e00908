#pragma once
// Rows of logits of gyre-logprobs, as they lie on one rank.

#include <span>
#include <vector>

#include "apps/logprobs/inputs.hpp"

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
  /// Made on first use.
  MatrixRef teacher();
  /// Gradient of the log-probabilities of all ids, in the output type; made on first use.
  MatrixRef d_logprobs();
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
  DType output_type_;
  bool in_place_, has_second_ = false, has_teacher_ = false, has_d_logprobs_ = false;
  LogitMatrix logits_;
  LogitMatrix second_;  // gradients; in place, the original
  LogitMatrix teacher_, d_logprobs_;
  Buffer<int32_t> targets_, ids_;
};

}  // namespace gyre
