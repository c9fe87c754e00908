#pragma once
// Log-probability problems with their reference answers, "gyre/logprobs", and what a run answered,
// "gyre/logprobs-results". inputs/SCHEMA.md describes both.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "io/schema.hpp"

namespace gyre {

inline constexpr const char* logprobs_schema = "gyre/logprobs";
inline constexpr const char* logprobs_results_schema = "gyre/logprobs-results";

/// Temperatures that leave room for logits in f32; an entropy's gradient is over their squares.
inline constexpr double least_temperature = 1e-15, most_temperature = 1e30;

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

/// Extents of an array of answers or results: T tokens, V ids, K ids of a token, D elements of a
/// hidden state, P predictions of a sequence at most.
enum class LogprobsShape {
  tokens,       ///< [T]
  picks,        ///< [T, K]
  top,          ///< [T, min(K, V)]
  vocab,        ///< [T, V]
  predictions,  ///< [sequences, P]
  hidden,       ///< [T, D]
  head,         ///< [V, D]
};

/// An array that /reference may have, and /results (inputs/SCHEMA.md says what each means).
struct LogprobsArray {
  std::string name;
  LogprobsShape shape;
  bool integers = false;
  /// The inputs of reals that it depends on, below /logprobs: answers are of their exact values.
  std::vector<std::string> reads = {"logits"};
};

/// Answers computed elsewhere in double precision: arrays by name, row by row. Log-probabilities
/// may be -inf, cross entropies +inf.
struct LogprobsReference {
  std::string generator;  ///< "" when the file does not say
  std::map<std::string, std::vector<double>> arrays;
  std::vector<std::string> unknown;  ///< datasets of other names, which nobody compares
};

struct LogprobsFile {
  int64_t vocab_size = 0, columns = 0;  ///< columns from vocab_size on are padding
  int64_t picks = 0;                    ///< ids of a token; 0: it has no ids
  int64_t top = 0;                      ///< entries of a row of top_values; 0: not known
  int64_t top_k = 0;                    ///< 0: no such limit
  double top_p = 1, temperature = 1;
  std::vector<int64_t> offsets{0};      ///< [sequences + 1] tokens
  std::vector<float> logits;            ///< [tokens, columns]
  std::vector<float> teacher;           ///< the same, or empty
  std::vector<float> teacher_values;    ///< [tokens, picks], or empty: those of teacher
  std::vector<int32_t> targets;         ///< [tokens]
  std::vector<int32_t> ids;             ///< [tokens, picks]
  std::vector<float> d_value;           ///< [tokens] gradient of every value
  std::vector<float> d_logprobs;        ///< [tokens, vocab_size], or empty: d_value of the token
  std::optional<LinearFactors> linear;  ///< if the file has them
  bool has_teacher = false, has_teacher_values = false;
  std::set<std::string> rounded = {};  ///< datasets that f32 does not hold exactly
  std::optional<LogprobsReference> reference;

  int64_t tokens() const { return offsets.back(); }
  int64_t longest() const;  ///< tokens of the longest sequence; 0 without one
};

/// All of a file, on every rank, and those `arrays` of answers that it has; types, shapes and
/// values are checked: logits are numbers or -inf, with a finite one in every row, ids are of the
/// vocabulary (targets may be anything), answers are not NaN. What the file leaves out has the
/// default of inputs/SCHEMA.md. A file that breaks the schema is a usage error that lists all
/// problems, a damaged one a runtime error. Collective; every rank reads a share.
LogprobsFile read_logprobs_file(Communicator& comm, const std::string& path,
                                const std::vector<LogprobsArray>& arrays);

/// What all ranks of a run know alike.
struct LogprobsResultsHeader {
  int64_t vocab_size = 0, top_k = 0;
  double top_p = 1, temperature = 1;
  std::string input_sha256;  ///< of the problem's file, or "" when it was made up
  Provenance provenance;
};

/// This rank's part of an array of results: some columns of some of its rows.
struct LogprobsPart {
  std::string name;
  h5::Shape shape;                 ///< of the whole array
  bool whole_numbers = false;      ///< its elements are `integers`
  std::vector<int64_t> rows = {};  ///< numbers of the rows, in any order; negative: not written
  int64_t first = 0;               ///< column of each; 0 for arrays of one dimension
  int64_t columns = 1;
  std::vector<float> values = {};      ///< [rows, columns]
  std::vector<int32_t> integers = {};  ///< the same instead

  int64_t bytes() const { return 4 * (std::ssize(values) + std::ssize(integers)); }
};

/// Writes the parts of all ranks and names the file. All ranks have the same arrays in the same
/// order; every element must come from exactly one rank: anything else is a runtime error that
/// names the row. Collective.
void write_logprobs_results(OutputFile& output, const LogprobsResultsHeader& header,
                            const std::vector<LogprobsPart>& mine);

}  // namespace gyre
