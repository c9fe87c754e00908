#pragma once
// A library's fused attention over ragged batches (ragged_batch.hpp), such as cuDNN's, as our
// kernel around it sees it.
//
// All arrays are row-major [rows, heads · head_dim] in device memory; an entry begins at the
// element that a table of offsets names, and has as many rows as a table of lengths says. Both are
// read on the device when the graph runs, so that one graph serves all batches up to its limits.
// Inputs and outputs are bf16, log-sum-exps and sums f32.
//
// Of an even batch (even_batch) arrays are [batch, rows, heads · head_dim]: addresses are those of
// the first entry, the others follow at equal distances, and there are no tables. Libraries have
// faster engines for these, and a graph serves one length alone.

#include <compare>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <string>

#include "attention/kernels/ragged_batch.hpp"

namespace gyre {

/// What a graph is built for.
struct AttentionGraphShape {
  bool backward = false;
  RaggedMask mask = RaggedMask::full;
  int64_t window = 0;  ///< of the batch
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;
  int64_t batch = 0;                     ///< entries, at most
  int64_t longest_q = 0, longest_k = 0;  ///< rows of an entry, at most
  bool even = false;                     ///< as many entries, and rows, as that
  /// Rows from entry to entry of an even batch, of q and d_out, of k and v, of out, and of d_q;
  /// those of d_k and d_v lie one behind the other, and so do the log-sum-exps of the backward
  /// pass: [batch, heads, rows].
  int64_t q_distance = 0, k_distance = 0, out_distance = 0, d_q_distance = 0;
  /// Elements between rows; those of d_k and d_v lie side by side.
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, out_stride = 0, lse_stride = 0;
  int64_t d_out_stride = 0, d_q_stride = 0;  ///< backward
  bool deterministic = false;                ///< backward: the same bits in every run
  friend auto operator<=>(const AttentionGraphShape&, const AttentionGraphShape&) = default;
};

/// The tensors of both graphs. The forward graph reads q, k and v and writes out and lse; the
/// backward graph reads out, lse and d_out beside them and writes d_q, d_k and d_v. What is wanted
/// of out there is its product with d_out alone. With as many heads of queries as of keys, d_k and
/// d_v of a ragged batch lie as k and v do.
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
  q_offsets,  ///< i64 [batch + 1]
  k_offsets,
  v_offsets,
  out_offsets,
  lse_offsets,
  d_out_offsets,
  d_q_offsets,
  d_k_offsets,  ///< of d_v too
};

using AttentionAddresses = std::map<AttentionTensor, void*>;

class AttentionGraph {
 public:
  virtual ~AttentionGraph() = default;
  virtual int64_t workspace_bytes() const = 0;
  /// Submits one run. `addresses`: of all tensors of the graph.
  virtual void execute(const AttentionAddresses& addresses, std::byte* workspace) = 0;
};

class AttentionLibrary {
 public:
  virtual ~AttentionLibrary() = default;
  virtual std::string name() const = 0;
  /// Whether a batch may have entries without rows.
  virtual EmptyEntries empty_entries() const { return EmptyEntries::taken; }
  /// Even batches of so many queries, or more, an entry are taken as such.
  virtual int64_t least_even_queries() const { return std::numeric_limits<int64_t>::max(); }
  /// Whether the graphs of a shape multiply values of rows that are in no entry, but in a tile with
  /// rows that are: by weights of 0, so that NaN there would be NaN in the results.
  virtual bool multiplies_masked_rows(const AttentionGraphShape& /*shape*/) { return false; }
  /// nullptr where the library does not take the shape; `problem` then says why.
  virtual std::unique_ptr<AttentionGraph> build(const AttentionGraphShape& shape,
                                                std::string& problem) = 0;
};

}  // namespace gyre
