#pragma once
// Divergence of a student q from a teacher p, Σ q (log q - log p), of the student's K largest ids
// or K given ones, and an estimate of what the other ids add, from the one that it sampled:
//
//     value = Σ_{k in ids} q_k (log q_k - log p_k)  +  log q_t - log p_t   unless t is among ids
//
// t is the target. Both distributions are over the whole vocabulary. The mean of the last term over
// targets drawn from q is the sum over the other ids. A target that no rank owns adds nothing.
//
//     gradient  d value / d log q_k = q_k (log q_k - log p_k + 1)
//               d value / d log q_t = log q_t - log p_t + 1    unbiased: the mean over targets of q
//                                                              gives that of the whole divergence
//                                     log q_t - log p_t        advantage: of a policy gradient
//                                                              with the advantage log p_t - log q_t
//               dz_v = Σ_{k in ids, t} d value / d log q_k ({k = v} - q_v)
//
//     forward   of a teacher's rows: each rank makes one pass over both its shards: partial sums,
//               its K largest of the student, and the teacher's logits of these
//               one all-gather of 24 + 12 min(K, most columns of a rank) bytes per token
//               each rank merges all lists and sums in rank order: the same bits everywhere
//               of given ids and log p: as VocabScores with K + 1 ids per token
//     backward  one pass over the student's shard (row_gradient); no communication
//
// Example, 2 ranks, student 0 1 2 | 3 4, teacher 4 3 2 | 1 0, K = 2, target 0:
//     ids 4 3, log q -0.452 -1.452, log p -4.452 -3.452
//     target: log q -4.452, log p -0.452
//     value = 0.636 · 4 + 0.234 · 2 - 4 = -0.986
//
// An id with a logit of -inf adds nothing. Where the teacher has -inf and the student has not, the
// value is +inf; a sampled id that the student has not makes it -inf. A row whose value is not
// finite has a gradient of NaN, unless none comes from above.
//
// Keeps 8 (K + 3) bytes per token for backward. Based on the student's top-K distillation of NeMo
// RL (PR 3584).

#include <memory>

#include "logprobs/vocab_parallel.hpp"

namespace gyre {

/// Chooses the gradient of the sampled term (see the file head).
enum class TailGradient { unbiased, advantage };

/// Most ids of a token; its target is one more.
inline constexpr int64_t most_divergence_ids = 65535;

struct TopKDivergenceOptions {
  int64_t k = 1;
  TailGradient tail = TailGradient::unbiased;
  bool ids_are_given = false;  ///< instead of found in the student's rows
  int threads = 1;
  RowKernels* kernels = nullptr;   ///< as in ScoreOptions
  Communicator* arrays = nullptr;  ///< as in ScoreOptions; used if ids_are_given
};

/// A teacher's log-probabilities, over the whole vocabulary.
struct TeacherLogprobs {
  std::span<const int32_t> ids;       ///< [tokens, K] global, different ones of a token
  std::span<const float> of_ids;      ///< [tokens, K]
  std::span<const float> of_targets;  ///< [tokens]; unused where no rank owns the target
};

class TopKDivergence {
 public:
  /// Collective. Throws the errors of VocabTopK, and one for k above most_divergence_ids.
  TopKDivergence(int64_t tokens, const VocabPartition& vocab, const TopKDivergenceOptions& options,
                 Communicator& tp);

  /// value [tokens] <- divergences, from logits of student and teacher [tokens, own columns] and
  /// targets [tokens] (global ids). Requires !ids_are_given. Collective: one all-gather. Returns
  /// the seconds waited.
  double forward(ConstMatrixRef student, ConstMatrixRef teacher, std::span<const int32_t> targets,
                 Stream& stream, std::span<float> value);
  /// Computes the divergences of given ids, at most as many as the vocabulary has. Requires
  /// ids_are_given.
  double forward(ConstMatrixRef student, const TeacherLogprobs& teacher,
                 std::span<const int32_t> targets, Stream& stream, std::span<float> value);

  /// d_student [tokens, own columns] <- gradient from d_value [tokens], after a forward pass with
  /// these logits. May be the logits' memory. No communication.
  void backward(ConstMatrixRef student, std::span<const float> d_value, MatrixRef d_student) const;

 private:
  struct Record;
  struct MergeRoom;
  void check_call(ConstMatrixRef student, size_t targets, size_t values) const;
  void make_record(ConstMatrixRef student, ConstMatrixRef teacher, std::span<const int32_t> targets,
                   Record& record) const;
  /// Merges all ranks' records of a row; returns its value.
  float merge_row(Record& all, int64_t row, int32_t target, MergeRoom& room);
  /// Returns a row's value, and sets its slopes_ and sums_, from log q and log p [length + 1] of
  /// its ids_. The last is the target's, which adds nothing if its id is -1.
  float finish(int64_t row, std::span<const double> log_q, std::span<const double> log_p);

  int64_t tokens_, length_;  // length_: min(K, vocabulary)
  VocabPartition vocab_;
  TailGradient tail_;
  int threads_;
  Communicator& tp_;
  RowKernels& kernels_;
  std::unique_ptr<VocabScores> scores_;  // of given ids
  Buffer<RowNormalizer> normalizers_;    // [tokens]; NaN where the value is not finite
  Buffer<int32_t> ids_;                  // [tokens, length + 1], last the target or -1
  Buffer<float> slopes_;                 // [tokens, length + 1] d value / d log q
  Buffer<double> sums_;                  // [tokens] of the slopes
};

}  // namespace gyre
