#pragma once
// Log-probabilities with several ids predicted by one row: the last row of a prompt predicts the
// first token of every answer to it.
//
//     rows      p0 p1 p2 | a0 a1 | b0 b1        prompt p, answers a and b, each stored once
//     ids       p1 p2  - | a1  - | b1  -        the ids that rows predict, at most one per row
//     branch    row 2: a0 b0                    the other ids that row 2 predicts
//
// A row's gradient is the sum over its predictions. One VocabScores scores `ids` (an all-gather of
// 12 bytes per row), then one per branch the K ids of its row (an all-gather of 4 (2 + K) bytes).

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "logprobs/vocab_parallel.hpp"

namespace gyre {

struct Branch {
  int64_t row = 0;
  std::vector<int32_t> ids;
};

class BranchingScores {
 public:
  /// Collective over `tp`; throws the errors of VocabScores. Ignores options.ids_per_token and
  /// options.entropy. Every row is in at most one branch.
  BranchingScores(int64_t rows, std::vector<Branch> branches, const VocabPartition& vocab,
                  const ScoreOptions& options, Communicator& tp);

  /// logprob <- log-probabilities of ids [rows], then of the branches' ids in order, from logits
  /// [rows, columns]. Rows of branches must have id -1. Returns the seconds waited. Collective.
  double forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
                 std::span<float> logprob);
  /// d_logits [rows, columns] <- gradient of the logits from that of logprob, which must be 0 for
  /// ids of -1. Follows a forward pass; d_logits may be the logits' memory. No communication.
  void backward(ConstMatrixRef logits, std::span<const int32_t> ids,
                std::span<const float> d_logprob, Stream& stream, MatrixRef d_logits) const;

  /// Number of elements of logprob.
  int64_t predictions() const { return rows_ + branch_ids_; }

 private:
  int64_t rows_, branch_ids_ = 0;
  std::vector<Branch> branches_;
  VocabScores of_rows_;
  std::deque<VocabScores> of_branches_;
};

}  // namespace gyre
