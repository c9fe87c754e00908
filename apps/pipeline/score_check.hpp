#pragma once
// Verification of scores, against the reference in the input file or against the serial reference
// decoder (the "twin").

#include <optional>
#include <span>

#include "comm/process_grid.hpp"
#include "io/model_file.hpp"
#include "io/results.hpp"
#include "model/decoder_reference.hpp"
#include "model/scoring.hpp"
#include "report/answers.hpp"
#include "report/tolerance.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Inputs common to all checks of one run.
struct ScoreCheck {
  const Documents& documents;
  const ModelConfig& config;
  ProcessGrid& grid;  ///< as many partial attention results are merged per layer as it has cp
  Verification& verification;
};

/// Compares this rank's predictions with the reference's, of the arrays that it has; adds checks
/// "logprob" and "entropy".
void check_scores(const ScoreCheck& check, const Reference& reference, const ScoreRange& mine);

/// Runs the decoder once more and compares the residual stream after the embedding and after every
/// layer with the reference's; adds checks "hidden[0]", "hidden[1]", ... Collective over the world.
void check_hidden(const ScoreCheck& check, const std::string& input, Scorer& scorer,
                  Decoder& decoder, Communicator& world);

/// Adds the check that every timed pass gave the bits of the pass whose messages were checked.
void check_passes(std::span<const uint64_t> checksums, Verification& checks);

/// Part of a document that the twin scores: its first `tokens` tokens (later tokens do not change
/// their scores).
struct TwinSample {
  int64_t document = 0;
  int64_t tokens = 0;
};
/// A sample of about `budget` tokens: documents spread evenly over the lengths, and the beginning
/// of the longest one.
std::vector<TwinSample> choose_twin_samples(const Documents& documents, int64_t budget);

/// Compares arrays that `reference` (null: none) does not have with those of the serial twin, which
/// scores `samples`, each on one rank, and less of them when that would take longer than `seconds`;
/// adds checks "logprob" and "entropy". `weights` are unsharded (tp = 1). Returns the samples that
/// were scored. Collective over `world`.
std::vector<TwinSample> check_against_twin(const ScoreCheck& check, const Reference* reference,
                                           std::vector<TwinSample> samples, double seconds,
                                           const DecoderWeights& weights, const ScoreRange& mine,
                                           Communicator& world);

/// The shape of the hidden states of a model of this configuration.
HiddenShape hidden_shape(const ModelConfig& config);

/// Sources of the reference values.
struct ScoreSources {
  const std::string& input;                   ///< documents file
  const std::optional<Reference>& reference;  ///< the one in it
  ModelFile& model;
  const std::string& model_sha256;
  int64_t check_tokens;  ///< budget of the serial twin
  double check_seconds;  ///< likewise
};

/// Runs the checks above: against the reference in the input, in full, and of what it does not have
/// a sample against the twin; merges them over all ranks. Returns "#" lines that say what was
/// compared. Collective over `world`.
std::string verify_scores(const ScoreCheck& check, const ScoreSources& sources, Scorer& scorer,
                          Decoder& decoder, const ScoreRange& mine, Communicator& world);

/// Says which arrays of a reference verify_scores compares.
std::vector<AnswerUse> answer_uses(const Reference& reference);

/// Reads slices of the weights of `model`.
WeightReader weights_of(ModelFile& model);

}  // namespace gyre
