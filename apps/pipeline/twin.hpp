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

/// Limits of the twin: it stops about when one of them is reached.
struct TwinBudget {
  int64_t tokens = 0;
  double seconds = 0;
};

/// Scores of the beginnings of some documents.
struct TwinScores {
  ReferenceScores scores = {};                     ///< with divergences if there is a teacher
  std::vector<double> teacher_logprob = {};        ///< of the tokens that came
  std::vector<int64_t> predictions = {};           ///< which one each score is of
  int64_t longest = 0, tokens = 0, documents = 0;  ///< scored tokens, and their documents
};

/// Scores documents spread evenly over the lengths, and the beginning of the longest one. All ranks
/// share the work and get all scores. Collective.
TwinScores score_by_twin(const Documents& documents, const TwinModel& model,
                         const TwinModel* teacher, const TwinBudget& budget, Communicator& world);

}  // namespace gyre
