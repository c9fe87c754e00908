#pragma once
// Files of attention inputs with their reference results, "gyre/attention", and of a run's results,
// "gyre/attention-results"; both are described in inputs/SCHEMA.md.
//
// Rows are tokens, one document after another: document i is rows offsets[i] to offsets[i+1] - 1. A
// token attends only to tokens of its own document. With /attention/query_offsets, only the last
// tokens of a document have queries: arrays of queries have a row for each of those.

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/view.hpp"
#include "io/schemas/schema.hpp"

namespace gyre {

inline constexpr const char* attention_schema = "gyre/attention";
inline constexpr const char* attention_results_schema = "gyre/attention-results";

/// Results computed elsewhere in double precision; lse is a natural logarithm. An array that the
/// file lacks is empty.
struct AttentionReference {
  std::string generator;              ///< "" when the file does not say
  std::vector<std::string> unknown;   ///< datasets of other names, which are not compared
  std::vector<double> out;            ///< [queries, heads, v_head_dim]
  std::vector<double> lse;            ///< [queries, heads], sinks included
  std::vector<double> d_q, d_k, d_v;  ///< shapes of /attention/q, k and v
  std::vector<double> d_k_shared;     ///< [tokens, shared_key_dim], or empty
  std::vector<double> d_sinks;        ///< [heads], or empty without sinks
};

/// Columns of /attention/regions: document, q_begin, q_end, k_begin, k_end, kind, window.
inline constexpr int64_t attention_region_columns = 7;

struct AttentionFile {
  int64_t heads = 0, kv_heads = 0, head_dim = 0, v_head_dim = 0;
  int64_t shared_key_dim = 0;          ///< width of /attention/k_shared; 0: the file has none
  std::string mask = "causal";         ///< causal, full, regions, or selected
  int64_t window = 0;                  ///< keys that a query sees, itself included; 0: no limit
  std::vector<int64_t> regions;        ///< [regions, columns] if mask is regions; else empty
  std::vector<int64_t> selected_keys;  ///< [queries, selected] if mask is selected; else empty
  int64_t selected = 0;                ///< number of columns of selected_keys
  double scale = 0;                    ///< factor of <q, k>
  std::vector<int64_t> offsets{0};     ///< [documents + 1]
  std::vector<int64_t> query_offsets;  ///< [documents + 1]; empty: all tokens have queries
  std::vector<float> q;                ///< [queries, heads, head_dim]
  std::vector<float> k;                ///< [tokens, kv_heads, head_dim], each head with k_shared
  std::vector<float> v;                ///< [tokens, kv_heads, v_head_dim]
  std::vector<float> d_out;            ///< [queries, heads, v_head_dim]
  std::vector<float> sinks;            ///< [heads] logits that have no value vector; or empty
  std::set<std::string> rounded;       ///< datasets that f32 cannot represent exactly
  std::optional<AttentionReference> reference;

  int64_t tokens() const { return offsets.back(); }
  /// Number of queries of a document.
  int64_t queries_of(int64_t document) const;
  /// The row of the query of a token, which has one.
  int64_t query_row(int64_t token) const;
};

/// Reads a whole file onto every rank, and checks types, shapes and that every number is finite (a
/// reference lse may be -inf). A file that breaks the schema is a usage error that lists all
/// problems, a damaged one a runtime error. Collective; every rank reads a share.
AttentionFile read_attention_file(Communicator& comm, const std::string& path);

/// The part of the results that is the same on all ranks.
struct AttentionResultsHeader {
  int64_t heads = 0, kv_heads = 0, head_dim = 0, v_head_dim = 0, shared_key_dim = 0;
  std::vector<int64_t> offsets{0};     ///< [documents + 1]
  std::vector<int64_t> query_offsets;  ///< [documents + 1]; empty: all tokens have queries
  bool gradients = false;              ///< whether d_q, d_k and d_v are present
  std::vector<double> d_sinks;         ///< [heads], or empty
  std::string input_sha256;            ///< SHA-256 of the input file, or "" for generated inputs
  Provenance provenance;
};

/// Results of one rank, rows in any order: of queries and of keys.
struct AttentionResultRows {
  std::vector<int64_t> queries;        ///< [queries] the query of each row; negative: padding
  std::vector<int64_t> tokens;         ///< [rows] the token of each row; negative: padding
  MatrixView<const float> out;         ///< [queries, heads · v_head_dim]
  MatrixView<const float> lse;         ///< [queries, heads]
  MatrixView<const float> d_q;         ///< [queries, heads · head_dim]
  MatrixView<const float> d_k;         ///< [rows, kv_heads · (head_dim - shared_key_dim)]
  MatrixView<const float> d_k_shared;  ///< [rows, shared_key_dim]
  MatrixView<const float> d_v;         ///< [rows, kv_heads · v_head_dim]
};

/// Writes the results of all ranks as write_token_results(). Collective.
void write_attention_results(OutputFile& output, const AttentionResultsHeader& header,
                             const AttentionResultRows& mine);

}  // namespace gyre
