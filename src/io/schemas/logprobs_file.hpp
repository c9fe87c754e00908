#pragma once
// Log-probability problems with their reference answers, "gyre/logprobs", and a run's answers,
// "gyre/logprobs-results"; both are described in inputs/SCHEMA.md.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/sparse_matrix.hpp"
#include "io/schemas/schema.hpp"

namespace gyre {

inline constexpr const char* logprobs_schema = "gyre/logprobs";
inline constexpr const char* logprobs_results_schema = "gyre/logprobs-results";

/// Limits that keep logits within f32; the entropy's gradient is divided by temperature squared.
inline constexpr double least_temperature = 1e-15, max_temperature = 1e30;
constexpr bool is_temperature(double t) {
  return t >= least_temperature && t <= max_temperature;
}
std::string temperature_range();
std::string top_k_range(int64_t vocab_size);
inline constexpr const char *top_p_range = "above 0 and at most 1, none",
                            *min_p_range = "from 0, none, to 1";
constexpr bool is_top_p(double p) {
  return p > 0 && p <= 1;
}
constexpr bool is_min_p(double p) {
  return p >= 0 && p <= 1;
}

/// Extents of an array, a letter for each dimension:
///
///     T tokens       S sequences    P predictions in the longest sequence
///     V ids of the vocabulary       C columns of logits, padding included
///     K ids of a token              L largest logits listed for a token, min(K, V)
///     D elements of a hidden state  J columns of a projection    E, I entries of a list
///     a small letter: one more, as of offsets
using LogprobsShape = std::string;

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

/// Arrays by name, row by row. An array that is not there is empty.
class LogprobsArrays {
 public:
  using Values = std::variant<std::vector<float>, std::vector<double>, std::vector<int32_t>,
                              std::vector<int64_t>>;

  bool has(const std::string& name) const { return arrays_.contains(name); }
  /// Requires T to be the type of logprobs_inputs() for this name.
  template <class T>
  const std::vector<T>& of(const std::string& name) const {
    static const std::vector<T> none;
    const auto found = arrays_.find(name);
    return found == arrays_.end() ? none : std::get<std::vector<T>>(found->second);
  }
  void set(const std::string& name, Values values) { arrays_[name] = std::move(values); }

 private:
  std::map<std::string, Values> arrays_;
};

struct LogprobsFile {
  int64_t vocab_size = 0, columns = 0;  ///< columns from vocab_size on are padding
  int64_t picks = 0;                    ///< ids per token; 0: the file has no ids
  int64_t top = 0;                      ///< entries per row of top_values; 0: unknown
  int64_t hidden = 0;                   ///< elements of a hidden state; 0: the file has none
  int64_t projected = 0;                ///< columns of the projection; 0: the file has none
  int64_t top_k = 0;                    ///< 0: no top-k filter
  double top_p = 1, temperature = 1, min_p = 0;
  std::vector<double> parameters;   ///< those of row_parameters() (logprobs/operations/)
  std::vector<int64_t> offsets{0};  ///< [sequences + 1], in tokens
  LogprobsArrays arrays;            ///< those of logprobs_inputs() that the file has
  std::set<std::string> rounded;    ///< datasets that f32 cannot represent exactly
  std::optional<LogprobsReference> reference;

  int64_t tokens() const { return offsets.back(); }
  int64_t longest() const;  ///< tokens of the longest sequence; 0 without one
  bool has(const std::string& name) const { return arrays.has(name); }
  const std::vector<float>& floats(const std::string& name) const { return arrays.of<float>(name); }
  const std::vector<int32_t>& ints(const std::string& name) const {
    return arrays.of<int32_t>(name);
  }
  /// The projection of the vocabulary to other columns; empty if there is none.
  SparseMatrixRef projection() const;
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
  std::vector<std::string> of_tokens =
      {};  ///< names of the filter's numbers that differ between tokens
  /// Names and values of the parameters of the operations with results.
  std::vector<std::pair<std::string, double>> parameters = {};
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
