#pragma once
// Files of a recurrence's inputs with their reference results, "gyre/recurrence", described in
// inputs/SCHEMA.md. Rows are tokens, one document after another: document i is rows offsets[i] to
// offsets[i+1] - 1, and its state begins with 0.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "io/schemas/schema.hpp"

namespace gyre {

inline constexpr const char* recurrence_schema = "gyre/recurrence";
/// The schema of a run's results, which write_token_results() writes.
inline constexpr const char* recurrence_results_schema = "gyre/recurrence-results";
/// The most tokens that a convolution reads.
inline constexpr int64_t max_convolution = 256;

/// Results computed elsewhere in double precision.
struct RecurrenceReference {
  std::string generator;             ///< "" when the file does not say
  std::vector<std::string> unknown;  ///< datasets of other names, which are not compared
  /// By name: out [tokens, heads, value_dim], and d_q, d_k, d_v, d_g, d_beta and d_conv_weight, as
  /// the inputs.
  std::map<std::string, std::vector<double>> arrays;
};

struct RecurrenceFile {
  int64_t heads = 0, key_heads = 0, key_dim = 0, value_dim = 0;
  double scale = 0;                 ///< factor of the output
  int64_t decay_dim = 0;            ///< of each head: 0, the file has one number a head, or key_dim
  std::vector<int64_t> offsets{0};  ///< [documents + 1]
  std::vector<float> q, k;          ///< [tokens, key_heads, key_dim]
  std::vector<float> v, d_out;      ///< [tokens, heads, value_dim]
  std::vector<float> g;             ///< [tokens, heads], or [tokens, heads, key_dim]
  std::vector<float> beta;          ///< [tokens, heads]; empty without the delta rule
  bool with_beta = false;
  std::vector<float> conv_weight;  ///< [channels, conv_width]
  int64_t conv_width = 0;          ///< 0: there is no convolution, q and k are as it leaves them
  std::set<std::string> rounded;   ///< datasets that f32 cannot represent exactly
  std::optional<RecurrenceReference> reference;

  int64_t tokens() const { return offsets.back(); }
  int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
  bool has_delta_rule() const { return with_beta; }
  bool has_channel_decay() const { return decay_dim > 0; }
};

/// Reads a whole file onto every rank, and checks types, shapes and that every number is finite. A
/// file that breaks the schema is a usage error that lists all problems, a damaged one a runtime
/// error. Collective; every rank reads a share.
RecurrenceFile read_recurrence_file(Communicator& comm, const std::string& path);

}  // namespace gyre
