#pragma once
// Log-probability problems with their reference answers, "gyre/logprobs", and what a run answered,
// "gyre/logprobs-results". inputs/SCHEMA.md describes both.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/schema.hpp"

namespace gyre {

inline constexpr const char* logprobs_schema = "gyre/logprobs";
inline constexpr const char* logprobs_results_schema = "gyre/logprobs-results";

/// Temperatures that leave room for logits in f32.
inline constexpr double least_temperature = 1e-30, most_temperature = 1e30;

/// Hidden states and the weight of a head, which make logits: logits[t, v] = Σ_d hidden[t, d] ·
/// head[v, d].
struct LinearFactors {
  int64_t width = 0;          ///< elements of a hidden state, D
  std::vector<float> hidden;  ///< [tokens, D]
  std::vector<float> head;    ///< [vocab_size, D]

  /// The largest norm of a hidden state times that of a row of the head, over √D: as large as the
  /// root of the mean square of logits would be if all rows were so and their angles random.
  double logit_size() const;
};

/// Answers of the scores of LinearFactors, whatever the file's logits are.
struct LinearReference {
  std::vector<double> logprob, entropy;  ///< [tokens]
  /// [tokens, D], [vocab_size, D]: of Σ d_value · (logprob + entropy)
  std::vector<double> d_hidden, d_head;
};

/// Answers computed elsewhere in double precision. Log-probabilities may be -inf, cross entropies
/// +inf.
struct LogprobsReference {
  std::string generator;
  std::vector<double> logprob, entropy, soft_cross_entropy, filtered_logprob;  ///< [tokens]
  std::vector<double> gathered;                                                ///< [tokens, picks]
  std::vector<double> top_values;          ///< [tokens, min(picks, vocab_size)], descending
  std::vector<int32_t> top_ids;            ///< the same; lower ids first among equals
  std::vector<double> next_token_logprob;  ///< [sequences, longest - 1], zeros behind each
  /// [tokens, vocab_size], of Σ d_value · value
  std::vector<double> d_logprob, d_entropy, d_gathered, d_soft_cross_entropy, d_filtered_logprob;
  std::optional<LinearReference> linear;  ///< of a file with LinearFactors
};

struct LogprobsFile {
  int64_t vocab_size = 0, columns = 0;  ///< columns from vocab_size on are padding
  int64_t picks = 0;                    ///< ids of a token
  int64_t top_k = 0;                    ///< 0: no such limit
  double top_p = 1, temperature = 1;
  std::vector<int64_t> offsets{0};      ///< [sequences + 1] tokens
  std::vector<float> logits, teacher;   ///< [tokens, columns]
  std::vector<int32_t> targets;         ///< [tokens]
  std::vector<int32_t> ids;             ///< [tokens, picks]
  std::vector<float> d_value;           ///< [tokens] gradient of every value
  std::optional<LinearFactors> linear;  ///< if the file has them
  std::optional<LogprobsReference> reference;

  int64_t tokens() const { return offsets.back(); }
  int64_t longest() const;  ///< tokens of the longest sequence; 0 without one
};

/// All of a file, on every rank; types, shapes and values are checked: logits are numbers or -inf,
/// with a finite one in every row, ids are of the vocabulary (targets may be anything), answers are
/// not NaN. A file that breaks the schema is a usage error that lists all problems, a damaged one a
/// runtime error. Collective; every rank reads a share.
LogprobsFile read_logprobs_file(Communicator& comm, const std::string& path);

/// What all ranks of a run know alike.
struct LogprobsResultsHeader {
  int64_t tokens = 0, vocab_size = 0, top_k = 0;
  int64_t length = 0;  ///< entries of a row of top_values
  double top_p = 1, temperature = 1;
  std::string input_sha256;  ///< of the problem's file, or "" when it was made up
  Provenance provenance;
};

/// Results of tokens [begin, begin + logprob.size()). Empty on ranks that write nothing.
struct LogprobsResultRows {
  int64_t begin = 0;
  std::span<const float> logprob, entropy, filtered_logprob;
  std::span<const float> top_values;  ///< [rows, length]
  std::span<const int32_t> top_ids;   ///< likewise
};

/// Writes the results of all ranks and names the file. Every token must come from exactly one rank;
/// anything else is a runtime error that names the token. Collective.
void write_logprobs_results(OutputFile& output, const LogprobsResultsHeader& header,
                            const LogprobsResultRows& mine);

}  // namespace gyre
