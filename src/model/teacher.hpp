#pragma once
// The divergence of a model, the student, from a teacher of the same vocabulary:
//
//     serial:   for every prediction, with the distributions p of the teacher and q of the student:
//                   KL(teacher || student) = Σ_v p_v (log p_v - log q_v)
//                                          = -Σ_v p_v log q_v - H(p)                       nats
//
//     for each bin:
//         the student scores it, and its hidden states before the head are kept
//         the teacher scores it, which gives H(p)
//         for each block of predictions: both models' logits of this rank's columns, and one
//             all-gather of 20 bytes per prediction (SoftCrossEntropy)
//
// Both models have the same slots of each bin. All else may differ: layers, heads, windows, widths.
// The difference of two roundings may be a little below 0. All arrays are in host memory.

#include <optional>
#include <span>

#include "logprobs/vocab_parallel.hpp"
#include "model/scoring.hpp"

namespace gyre {

/// Plans a pass of a teacher over the bins and layouts of `plan`, the student's, which was made of
/// `offsets`. Divides the bins anew among the replicas, in both plans, by the FLOPs of both models.
/// Throws plan_scoring()'s usage errors.
ScoringPlan plan_teacher(ScoringPlan& plan, const ModelConfig& student, const ModelConfig& teacher,
                         std::span<const int64_t> offsets);

/// FLOPs of the logits of both models after each of `tokens` tokens.
double divergence_flops(int64_t tokens, const ModelConfig& teacher, const ModelConfig& student);
/// Bytes of the kept hidden states, the cross entropies, the blocks of logits and their records on
/// a rank whose largest bin has that many predictions.
int64_t divergence_bytes(const ScoringPlan& plan, const ModelConfig& teacher,
                         const ModelConfig& student, int64_t predictions);

class Teacher {
 public:
  /// Plans the teacher's bins of this rank (plan_teacher()). Both must outlive the object. `config`
  /// has the student's vocab_padded (with_padding()).
  Teacher(const DocumentView& documents, const ModelConfig& config, const ModelConfig& student,
          const ScoringPlan& plan, ProcessGrid& grid);
  /// Sets the teacher's decoder. Collective over the tp group.
  void set_decoder(Decoder& decoder);

  const Scorer& scorer() const { return scorer_; }
  const ModelConfig& config() const { return config_; }
  const ScoringPlan& plan() const { return plan_; }
  /// Decoder::perturb_norms() of the teacher's decoder.
  void perturb_norms(double deviation, uint64_t seed) { decoder_->perturb_norms(deviation, seed); }
  /// FLOPs of a pass that it adds to the student's.
  double flops() const {
    return plan_.flops(config_) + divergence_flops(plan_.tokens, config_, student_);
  }
  /// Adds the work of this rank in a pass to the student's.
  void add_to(PassWork& student) const;
  /// divergence_bytes() of the largest bin of this rank.
  int64_t bytes() const;

  /// Keeps the inputs of the student's head for diverge(). The head itself must stay unchanged.
  void keep_student(ConstMatrixRef h, ConstMatrixRef head);
  /// Runs the teacher over bin shards()[shard] and sets the divergences of `scores`, the student's
  /// scores of the bin. Collective over the cp and tp groups.
  DecoderTimes diverge(int64_t shard, std::span<PredictionScore> scores);

 private:
  /// cross_[r] <- -Σ p log q of every row; returns the seconds that it waited for other ranks.
  double cross_entropies(ConstMatrixRef teacher, ConstMatrixRef teacher_head);

  ModelConfig config_, student_;
  const ScoringPlan& plan_;
  ProcessGrid& grid_;
  Scorer scorer_;
  VocabPartition vocab_;
  Decoder* decoder_ = nullptr;
  std::optional<SoftCrossEntropy> soft_;
  Buffer<std::byte> kept_;
  ConstMatrixRef h_, head_;  // the student's: in kept_, and its decoder's
  Buffer<float> cross_;
};

/// Reads the weights of a model whose vocabulary is padded to `from` as if it were padded to `to`.
/// The rows of the embedding and the columns of the head that the file lacks are 0.
WeightReader with_padding(WeightReader read, int64_t from, int64_t to);

}  // namespace gyre
