#pragma once
// Student log-probabilities at the teacher's K largest logits, for distillation losses.
//
//     teacher_k = log-softmax over the K logits of the teacher (equal on all ranks, no gradient)
//     all_ids:      student_k = log p(id_k) over the whole vocabulary, and optionally the entropy:
//                   one pass, one all-gather of 4 (2 + K) bytes per token, 4 more with entropy
//     renormalised: student_k = log-softmax over the K gathered logits; the partition function
//                   cancels, so only K elements per token are read: one all-reduce of 4 K bytes
//
// Ids may repeat: their gradients add up, and when renormalised each occurrence is a term of the
// sum. Based on get_distillation_topk_logprobs_from_logits of NeMo RL (zero_outside_topk =
// all_ids), but with Shannon's sign of the entropy. The last position of a sequence is dropped in
// sequence_scores.hpp.

#include <memory>

#include "logprobs/vocab_parallel.hpp"

namespace gyre {

struct DistillationOptions {
  int64_t ids_per_token = 1;  ///< K
  bool renormalised = false;  ///< whether `student` is a log-softmax over the K ids only
  bool entropy = false;       ///< whether the student's entropy is wanted; not if renormalised
  int threads = 1;
  RowKernels* kernels = nullptr;   ///< as in ScoreOptions
  Communicator* arrays = nullptr;  ///< as in ScoreOptions
};

class DistillationScores {
 public:
  /// Collective. Throws the errors of VocabScores, and one for K < 1 or an entropy with
  /// `renormalised`.
  DistillationScores(int64_t tokens, const VocabPartition& vocab,
                     const DistillationOptions& options, Communicator& tp);

  /// student, teacher [tokens, K], entropy [tokens] or empty <- scores from logits [tokens,
  /// columns] and the teacher's logits and ids [tokens, K]. Ids outside [0, vocabulary size) are an
  /// error of the program. Collective: one operation. Returns the seconds waited.
  double forward(ConstMatrixRef logits, std::span<const float> teacher_logits,
                 std::span<const int32_t> ids, Stream& stream, std::span<float> student,
                 std::span<float> teacher, std::span<float> entropy);

  /// d_logits <- gradient from d_student [tokens, K] and d_entropy ([tokens] or empty). May be the
  /// logits' memory. No communication.
  void backward(ConstMatrixRef logits, std::span<const int32_t> ids,
                std::span<const float> d_student, std::span<const float> d_entropy,
                MatrixRef d_logits) const;

 private:
  int64_t tokens_;
  int64_t vocab_size_;
  DistillationOptions options_;
  std::unique_ptr<VocabScores> scores_;       // all ids
  std::unique_ptr<GatheredLogits> gathered_;  // renormalised
  Buffer<float> student_;                     // [tokens, K] when renormalised
};

}  // namespace gyre
