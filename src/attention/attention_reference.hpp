#pragma once
// Attention of packed documents by its definition, serial, in double precision: the reference for
// every schedule and kernel.
//
// For query i of a document and query head h, over the keys j that the mask makes visible to i, of
// KV head h / (heads / kv_heads):
//
//     x_ij = scale · <q_i, k_j>,  L_i = log Σ exp(x_ij),  O_i = Σ exp(x_ij - L_i) v_j
//     with a sink z_h:  L'_i = log(exp L_i + exp z_h),  O'_i = O_i · exp(L_i - L'_i)
//     p = exp(x_ij - L'_i),  delta_i = <O'_i, dO_i>,  ds = p · (<dO_i, v_j> - delta_i)
//     dq_i = scale · Σ_j ds · k_j     dk_j = scale · Σ_ih ds · q_i     dv_j = Σ_ih p · dO_i
//     dz_h = - Σ_i exp(z_h - L'_i) · delta_i
//
// A query that sees no key has O = 0 and L = -inf, or L' = z_h with a sink.
//
// Rounding errors are relative to the terms of a result, not to the result, which cancellation can
// make arbitrarily small: a query that sees one key has dq = 0 for any inputs. Therefore every
// result comes with a size: the root of the sum of squares of its terms, as an rms over a row of
// one head, of D = head_dim or E = value_dim values:
//
//     size of O      sqrt Σ_j (p |v_j|)² / E
//     size of dq     scale · sqrt Σ_j (p a_ij |k_j|)² / D
//     size of dk     scale · sqrt Σ_ih (p a_ij |q_i|)² / D
//     of its shared elements, summed over KV heads: the root of the sum of squares of their sizes
//     size of dv     sqrt Σ_ih (p |dO_i|)² / E
//     size of dz     sqrt Σ_i (exp(z - L'_i) |O'_i| |dO_i|)² / E
//
// where |.| is the length of a row of one head, and a_ij = |dO_i| |v_j| / sqrt(E) is the rms of
// <dO_i, v_j> for random directions. If all terms have the same direction, the rms of the result is
// larger than its size; errors are relative to the larger of the two.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/rectangle.hpp"

namespace gyre {

/// Inputs of attention; T is float or double. Rows are tokens, without padding.
template <class T>
struct AttentionInputs {
  HeadShape heads;
  MaskRule mask;
  std::span<const int64_t> documents;  ///< [documents + 1] first tokens, ascending from 0
  std::span<const T> q;                ///< [tokens, heads, head_dim]
  std::span<const T> k;                ///< [tokens, kv_heads, head_dim]
  std::span<const T> v;                ///< [tokens, kv_heads, value_dim]
  std::span<const T> d_out;            ///< [tokens, heads, value_dim]; empty: no gradients
  std::span<const T> sinks = {};       ///< [heads] logits; empty: no sinks
};

/// Results and their sizes (see the head of this file). Gradients are empty when d_out is; d_sinks
/// is also empty without sinks.
struct AttentionResults {
  std::vector<double> out;         ///< [tokens, heads, value_dim]
  std::vector<double> lse, delta;  ///< [tokens, heads]; lse is L' with sinks
  /// Shapes of q, k and v. If KV heads share elements of their keys, the first head of d_k has the
  /// sum of their gradients, the others have 0.
  std::vector<double> d_q, d_k, d_v;
  std::vector<double> d_sinks;             ///< [heads]
  std::vector<double> out_size, d_q_size;  ///< [tokens, heads]
  std::vector<double> d_k_size, d_v_size;  ///< [tokens, kv_heads]
  std::vector<double> d_k_shared_size;     ///< [tokens], of the sums; empty if nothing is shared
  std::vector<double> d_sinks_size;        ///< [heads]
};

/// O(visible pairs · heads · (head_dim + value_dim)) time, O(tokens) memory. Usage errors name a
/// tensor of the wrong length, document boundaries that do not ascend, and heads that no KV head
/// serves.
template <class T>
AttentionResults attention_reference(const AttentionInputs<T>& inputs);

/// Inputs through accessors, for problems that do not fit in memory. An accessor returns the row of
/// a token, with all heads, valid until its next call.
struct AttentionRows {
  using Row = std::function<const float*(int64_t token)>;
  HeadShape heads;
  MaskRule mask;
  Row q, k, v, d_out;                 ///< d_out may be null: no gradients
  std::span<const float> sinks = {};  ///< [heads] or empty
};

/// Tokens [begin, end) of one document; `index` is its number in the mask.
struct DocumentRange {
  int64_t begin = 0, end = 0, index = 0;
  int64_t length() const { return end - begin; }
};

/// Results of the requested queries, in their order.
struct QueryResults {
  std::vector<double> out;                 ///< [queries, heads, value_dim]
  std::vector<double> lse, delta;          ///< [queries, heads]; no delta without d_out
  std::vector<double> d_q;                 ///< [queries, heads, head_dim]; empty without d_out
  std::vector<double> out_size, d_q_size;  ///< [queries, heads]
};
/// Computes requested queries of one document; fetches every key once. O(queries · keys · heads ·
/// (head_dim + value_dim)) time. A usage error names a token that is not in the document.
QueryResults reference_queries(const AttentionRows& rows, const DocumentRange& document,
                               std::span<const int64_t> tokens);

/// Results of the requested keys, in their order.
struct KeyResults {
  std::vector<double> d_k;                 ///< [keys, kv_heads, head_dim], as in AttentionResults
  std::vector<double> d_v;                 ///< [keys, kv_heads, value_dim]
  std::vector<double> d_k_size, d_v_size;  ///< [keys, kv_heads]
  std::vector<double> d_k_shared_size;     ///< [keys], or empty
};
/// Gradients of requested keys of one document from the final log-sum-exps (including sinks) and
/// deltas of all its queries, [document length, heads]. Fetches every query once. A usage error
/// names a token that is not in the document, or says that d_out is missing.
KeyResults reference_keys(const AttentionRows& rows, const DocumentRange& document,
                          std::span<const int64_t> tokens, std::span<const double> lse,
                          std::span<const double> delta);

}  // namespace gyre
