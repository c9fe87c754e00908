#pragma once
// Rows of logits of gyre-logprobs on one rank.

#include <span>
#include <vector>

#include "apps/logprobs/inputs.hpp"

namespace gyre {

/// Rows of logits on one rank, with the ids to score in each row.
class LogprobsRows {
 public:
  /// tokens [rows] holds the token of each row, negative for padding.
  LogprobsRows(const LogprobsWorkload& problem, const LogprobsInputs& inputs,
               std::vector<int64_t> tokens, int tp_rank, bool in_place);
  /// Keeps matrices in the memory space of `stream`, and fills and copies them in its order.
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
  /// Gradient of result `i` of each row (LogprobsInputs::gradient); 0 for padding.
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
  LogitMatrix second_;  // the gradient; in place, a copy of the logits
  LogitMatrix teacher_, d_logprobs_;
  Buffer<int32_t> targets_, ids_;
};

}  // namespace gyre
