#pragma once
// Graphs of cuDNN's fused attention over ragged batches (see ragged_batch.hpp), built with its C++
// front end. For sources that include that anyway.
//
// All arrays are row-major [rows, heads · head_dim]; an entry begins at a row that a table of
// offsets names, and has as many rows as a table of lengths says. Both are read on the device when
// the graph runs, so that one graph serves all batches up to its limits.

#include <cudnn_frontend.h>

#include <compare>
#include <memory>
#include <optional>
#include <string>

#include "attention/kernels/ragged_batch.hpp"

namespace gyre {

/// What a graph is built for.
struct AttentionGraphShape {
  bool backward = false;
  RaggedMask mask = RaggedMask::full;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;
  int64_t batch = 0;                     ///< entries, at most
  int64_t longest_q = 0, longest_k = 0;  ///< rows of an entry, at most
  int64_t q_rows = 0, k_rows = 0;        ///< scratch rows, at most
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, d_out_stride = 0;  ///< elements between rows
  /// Forward only; elsewhere the arrays of the scratch rows are packed.
  int64_t out_stride = 0, lse_stride = 0;
  bool deterministic = false;  ///< backward: the same bits in every run
  friend auto operator<=>(const AttentionGraphShape&, const AttentionGraphShape&) = default;
};

/// The tensors of both graphs, by the number under which cuDNN is given their addresses.
enum class AttentionTensor : int64_t {
  q = 1,
  k,
  v,
  out,
  lse,
  d_out,
  d_q,
  d_k,
  d_v,
  q_lengths,  ///< i32 [batch]
  k_lengths,
  q_offsets,  ///< i64 [batch + 1]; of d_q too
  k_offsets,
  v_offsets,
  out_offsets,
  lse_offsets,
  d_out_offsets,
  d_q_offsets,
  d_k_offsets,  ///< of d_v too
};
inline constexpr auto first_table = AttentionTensor::q_lengths;

using CudnnGraph = cudnn_frontend::graph::Graph;

/// The corner from which cuDNN counts the diagonal of a mask; none where there is no diagonal.
std::optional<cudnn_frontend::DiagonalAlignment_t> diagonal_of(RaggedMask mask);

/// The graph, not yet validated. bf16, sums in f32. `sm_version` (90 for compute capability 9.0):
/// that of the device it is for, 0: of the current one.
std::shared_ptr<CudnnGraph> make_attention_graph(const AttentionGraphShape& shape, int sm_version);

/// Why cuDNN's front end does not take a graph; empty when it does. Needs no device when
/// `sm_version` is given. What the library itself makes of it only a build on a device shows.
std::string refusal(const AttentionGraphShape& shape, int sm_version);

}  // namespace gyre
