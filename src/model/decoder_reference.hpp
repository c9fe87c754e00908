#pragma once
// The decoder's serial twin: one document, double precision, plain loops, never tuned.

#include <span>
#include <vector>

#include "model/decoder.hpp"

namespace gyre {

struct ReferenceScores {
  std::vector<double> logprob;  ///< of the next token: [max(0, tokens - 1)]
  std::vector<double> entropy;  ///< same length, nats
  // The following compare p of a teacher with q of the model; they are empty without a teacher.
  std::vector<double> kl;         ///< Σ p (log p - log q), nats
  std::vector<double> distance;   ///< Σ |p - q|
  std::vector<double> deviation;  ///< Σ p |log p - log q - kl|
};

/// Logits [tokens, vocab_padded] after every token of one document, with the whole weights
/// (load_weights with tp = 1). It shares no code with the parallel decoder but rotary_of(): norms,
/// rotations, attention and softmax are written out here.
/// `observe` gets (index, x [tokens · hidden]) as HiddenObserver does.
std::vector<double> logits_reference(
    const ModelConfig& config, const DecoderWeights& weights, std::span<const int32_t> tokens,
    const std::function<void(int64_t index, std::span<const double> x)>& observe = {});

/// The scores of a document from these logits.
ReferenceScores scores_reference(const ModelConfig& config, std::span<const double> logits,
                                 std::span<const int32_t> tokens);
inline ReferenceScores score_document_reference(
    const ModelConfig& config, const DecoderWeights& weights, std::span<const int32_t> tokens,
    const std::function<void(int64_t index, std::span<const double> x)>& observe = {}) {
  return scores_reference(config, logits_reference(config, weights, tokens, observe), tokens);
}

/// Adds kl, distance and deviation to the scores of a document, from all logits of both models.
void add_divergences_reference(const ModelConfig& student, std::span<const double> student_logits,
                               const ModelConfig& teacher, std::span<const double> teacher_logits,
                               ReferenceScores& scores);

}  // namespace gyre
