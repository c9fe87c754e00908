#pragma once
// Verification of scores: against the reference in the input file, or against the decoder's serial
// twin.

#include <span>

#include "io/model_file.hpp"
#include "io/results.hpp"
#include "model/decoder_reference.hpp"
#include "model/scoring.hpp"
#include "report/tolerance.hpp"
#include "report/verify.hpp"

namespace gyre {

/// What the checks of one run have in common.
struct ScoreCheck {
  const Documents& documents;
  const ModelConfig& config;
  int merges;  ///< partial attention results folded per layer: cp
  Verification& verification;
};

/// Compares this rank's predictions with the reference's; adds checks "logprob" and "entropy".
void check_scores(const ScoreCheck& check, const Reference& reference, const ScoreRange& mine);

/// Runs the decoder once more and compares the residual stream after the embedding and after every
/// layer with the reference's; adds checks "hidden[0]", "hidden[1]", ... Collective over the world.
void check_hidden(const ScoreCheck& check, const std::string& input, const Reference& reference,
                  Scorer& scorer, Decoder& decoder, Communicator& world);

/// Part of a document that the twin scores: its first `tokens` tokens (what follows does not change
/// them).
struct TwinSample {
  int64_t document = 0;
  int64_t tokens = 0;
};
/// A sample of about `budget` tokens: documents spread evenly over the lengths, and the beginning
/// of the longest one.
std::vector<TwinSample> choose_twin_samples(const Documents& documents, int64_t budget);

/// Scores `samples` with the serial twin (each by one rank) and compares; adds checks "logprob" and
/// "entropy". `weights` are whole (tp = 1). Collective over `world`.
void check_against_twin(const ScoreCheck& check, std::span<const TwinSample> samples,
                        const DecoderWeights& weights, const ScoreRange& mine, Communicator& world);

/// Where the values to compare with come from.
struct ScoreSources {
  const std::string& input;  ///< documents file, perhaps with a reference
  ModelFile& model;
  const std::string& model_sha256;
  int64_t check_tokens;  ///< budget of the serial twin
};

/// All of the above: against the reference in the input if there is one, else a sample against the
/// twin; merged over all ranks. Returns "#" lines that say what was compared with what. Collective
/// over `world`.
std::string verify_scores(const ScoreCheck& check, const ScoreSources& sources, Scorer& scorer,
                          Decoder& decoder, const ScoreRange& mine, Communicator& world);

/// Reads slices of the weights of `model`.
WeightReader weights_of(ModelFile& model);

}  // namespace gyre
