#pragma once
// The decoder's serial twin: one document, double precision, plain loops, never tuned.

#include <span>
#include <vector>

#include "model/decoder.hpp"

namespace gyre {

struct ReferenceScores {
  std::vector<double> logprob;  ///< of the next token: [max(0, tokens - 1)]
  std::vector<double> entropy;  ///< same length, nats
};

/// Scores one document with the whole weights (load_weights with tp = 1). It shares no code with
/// the parallel decoder but rotary_of(): norms, rotations, attention and softmax are written out
/// here.
/// `observe` gets (index, x [tokens · hidden]) as HiddenObserver does.
ReferenceScores score_document_reference(
    const ModelConfig& config, const DecoderWeights& weights, std::span<const int32_t> tokens,
    const std::function<void(int64_t index, std::span<const double> x)>& observe = {});

}  // namespace gyre
