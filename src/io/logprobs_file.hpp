#pragma once
// Log-probability problems with their reference answers, "gyre/logprobs", and a run's answers,
// "gyre/logprobs-results"; both are described in inputs/SCHEMA.md.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/sparse_matrix.hpp"
#include "io/schema.hpp"

namespace gyre {

inline constexpr const char* logprobs_schema = "gyre/logprobs";
inline constexpr const char* logprobs_results_schema = "gyre/logprobs-results";

/// Limits that keep logits within f32; the entropy's gradient is divided by temperature squared.
inline constexpr double least_temperature = 1e-15, max_temperature = 1e30;
constexpr bool is_temperature(double t) {
  return t >= least_temperature && t <= max_temperature;
}
constexpr bool is_top_p(double p) {
  return p > 0 && p <= 1;
}
constexpr bool is_min_p(double p) {
  return p >= 0 && p <= 1;
}

/// Hidden states and the weight of a head, whose product is the logits: logits[t, v] = Σ_d
/// hidden[t, d] · head[v, d].
struct LinearFactors {
  int64_t width = 0;          ///< elements of a hidden state, D
  std::vector<float> hidden;  ///< [tokens, D]
  std::vector<float> head;    ///< [vocab_size, D]

  /// Largest norm of a hidden state times largest norm of a row of the head, over √D: the root mean
  /// square of the logits if all vectors had these norms and random directions.
  double logit_size() const;
};

/// A matrix of weights that projects probabilities of the vocabulary to other columns.
struct StoredProjection {
  int64_t width = 0;               ///< number of columns, C
  std::vector<int64_t> offsets;    ///< [vocab_size + 1]
  std::vector<int32_t> columns;    ///< [entries]
  std::vector<float> weights;      ///< [entries]
  std::vector<float> d_projected;  ///< [tokens, C] upstream gradient, or empty: d_value applies

  SparseMatrixRef matrix() const { return {width, offsets, columns, weights}; }
};

/// Extents of an array of answers or results: T tokens, V vocabulary ids, K ids per token, D
/// elements of a hidden state, P predictions in the longest sequence, C columns of a projection.
enum class LogprobsShape {
  tokens,       ///< [T]
  picks,        ///< [T, K]
  top,          ///< [T, min(K, V)]
  vocab,        ///< [T, V]
  predictions,  ///< [sequences, P]
  hidden,       ///< [T, D]
  head,         ///< [V, D]
  projected,    ///< [T, C]
};

/// An array that /reference and /results may have (inputs/SCHEMA.md defines each).
struct LogprobsArray {
  std::string name;
  LogprobsShape shape;
  bool integers = false;
  /// Real inputs below /logprobs that it depends on: answers are computed from their exact values.
  std::vector<std::string> reads = {"logits"};
};

/// Answers computed elsewhere in double precision: arrays by name, row by row. Log-probabilities
/// may be -inf, cross entropies +inf.
struct LogprobsReference {
  std::string generator;  ///< "" when the file does not say
  std::map<std::string, std::vector<double>> arrays;
  std::vector<std::string> unknown;  ///< datasets of other names, which are not compared
};

struct LogprobsFile {
  int64_t vocab_size = 0, columns = 0;  ///< columns from vocab_size on are padding
  int64_t picks = 0;                    ///< ids per token; 0: the file has no ids
  int64_t top = 0;                      ///< entries per row of top_values; 0: unknown
  int64_t top_k = 0;                    ///< 0: no top-k filter
  double top_p = 1, temperature = 1, min_p = 0;
  /// [tokens] of each token, instead of the numbers above; or empty: the number is of all.
  std::vector<double> temperatures, top_ps, min_ps;
  std::vector<int32_t> top_ks;
  std::vector<int64_t> offsets{0};    ///< [sequences + 1], in tokens
  std::vector<float> logits;          ///< [tokens, columns]
  std::vector<float> teacher;         ///< [tokens, columns], or empty
  std::vector<float> teacher_values;  ///< [tokens, picks] teacher logits at the ids, or empty
  /// A teacher's log-probabilities over the vocabulary: of the ids, which are then the student's
  /// largest, and of the targets; or empty.
  std::vector<float> teacher_logprobs;         ///< [tokens, picks]
  std::vector<float> teacher_target_logprobs;  ///< [tokens]
  std::vector<int32_t> targets;                ///< [tokens]
  std::vector<int32_t> ids;                    ///< [tokens, picks]
  /// Ids that a sampler kept in row t: kept_ids[kept_offsets[t]] to [kept_offsets[t + 1] - 1].
  std::vector<int64_t> kept_offsets;  ///< [tokens + 1], or empty: there are none
  std::vector<int32_t> kept_ids;
  std::vector<float> d_value;           ///< [tokens] upstream gradient of each value
  std::vector<float> d_logprobs;        ///< [tokens, vocab_size], or empty: d_value applies
  std::optional<LinearFactors> linear;  ///< if the file has hidden states and a head
  std::optional<StoredProjection> projection;
  bool has_teacher = false, has_teacher_values = false, has_teacher_logprobs = false;
  std::set<std::string> rounded = {};  ///< datasets that f32 cannot represent exactly
  std::optional<LogprobsReference> reference;

  int64_t tokens() const { return offsets.back(); }
  int64_t longest() const;  ///< tokens of the longest sequence; 0 without one
};

/// Reads a whole file, with those `arrays` of answers that it has, onto every rank. Types, shapes
/// and values are checked: logits are numbers or -inf, with a finite one in every row; ids are in
/// the vocabulary (targets may be anything); answers are not NaN. Missing items have the defaults
/// of inputs/SCHEMA.md. A file that breaks the schema is a usage error that lists all problems, a
/// damaged one a runtime error. Collective; every rank reads a share.
LogprobsFile read_logprobs_file(Communicator& comm, const std::string& path,
                                const std::vector<LogprobsArray>& arrays);

/// The part of the results that is the same on all ranks.
struct LogprobsResultsHeader {
  int64_t vocab_size = 0, top_k = 0;  ///< of the filter of all tokens
  double top_p = 1, temperature = 1, min_p = 0;
  std::vector<std::string> of_tokens = {};  ///< names of the parameters that differ between tokens
  std::string input_sha256;  ///< SHA-256 of the problem's file, or "" if it was generated
  Provenance provenance;
};

/// This rank's part of a results array: some columns of some rows.
struct LogprobsPart {
  std::string name;
  h5::Shape shape;                 ///< of the whole array
  bool whole_numbers = false;      ///< the elements are in `integers`
  std::vector<int64_t> rows = {};  ///< row indices in any order; negative: not written
  int64_t first = 0;               ///< first column; 0 for one-dimensional arrays
  int64_t columns = 1;
  std::vector<float> values = {};      ///< [rows, columns]
  std::vector<int32_t> integers = {};  ///< [rows, columns], used if whole_numbers

  int64_t bytes() const { return 4 * (std::ssize(values) + std::ssize(integers)); }
};

/// Writes the parts of all ranks to the temporary file. All ranks have the same arrays in the same
/// order. Every element must come from exactly one rank; otherwise a runtime error names the row.
/// Collective.
void write_logprobs_results(OutputFile& output, const LogprobsResultsHeader& header,
                            const std::vector<LogprobsPart>& mine);

}  // namespace gyre
