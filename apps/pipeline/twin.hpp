#pragma once
// Scores of a sample of the documents by the serial reference decoder (the "twin").

#include <cstdint>
#include <vector>

#include "comm/communicator.hpp"
#include "io/schemas/documents.hpp"
#include "model/decoder_reference.hpp"

namespace gyre {

/// A model with its whole weights (load_weights with tp = 1), as the pass rounds them.
struct TwinModel {
  ModelConfig config;
  DecoderWeights weights;
};

/// Limits of the twin, which stops at about the first one that it reaches.
struct TwinBudget {
  int64_t tokens = 0;
  double seconds = 0;
};

/// Scores of the beginnings of some documents.
struct TwinScores {
  ReferenceScores scores = {};                     ///< with divergences if there is a teacher
  std::vector<double> teacher_logprob = {};        ///< of the next tokens, by the teacher
  std::vector<int64_t> predictions = {};           ///< index of the prediction of each score
  int64_t longest = 0, tokens = 0, documents = 0;  ///< longest beginning, all tokens, documents
};

/// Scores documents spread evenly over the lengths, and the beginning of the longest one. All ranks
/// share the work and get all scores. Collective.
TwinScores score_by_twin(const Documents& documents, const TwinModel& model,
                         const TwinModel* teacher, const TwinBudget& budget, Communicator& world);

}  // namespace gyre
