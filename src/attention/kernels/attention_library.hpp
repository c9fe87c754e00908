#pragma once
// Interface to a library's fused attention over ragged batches (ragged_batch.hpp), such as cuDNN's,
// for the kernel in cuda_ragged_kernel.hpp.
//
// All arrays are row-major [rows, heads · dim] in device memory, where dim is value_dim for values
// and outputs, head_dim for queries and keys. Tables give the first element (offsets) and the
// number of rows (lengths) of each entry. The device reads them when the graph runs, so that one
// graph serves all batches of as many entries, up to its limits. Inputs and outputs are bf16,
// log-sum-exps and sums f32.
//
// Even batches (even_batch) are [batch, rows, heads · dim]: the address is that of the first
// entry, the others follow at equal distances, and there are no tables. Libraries have faster
// engines for these, but a graph serves only one length.

#include <compare>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <string>

#include "attention/kernels/ragged_batch.hpp"

namespace gyre {

/// Parameters of a graph.
struct AttentionGraphShape {
  bool backward = false;
  RaggedMask mask = RaggedMask::full;
  int64_t window = 0;  ///< see RaggedBatch
  int64_t heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  float scale = 0;
  int64_t batch = 0;                     ///< number of entries
  int64_t longest_q = 0, longest_k = 0;  ///< largest number of rows of an entry
  bool even = false;                     ///< the batch is even; the limits above are exact
  /// Even batches: rows between the starts of consecutive entries, for q and d_out, for k and v,
  /// for out, and for d_q. Entries of d_k and d_v are contiguous, as are the log-sum-exps of the
  /// backward pass, [batch, heads, rows].
  int64_t q_distance = 0, k_distance = 0, out_distance = 0, d_q_distance = 0;
  /// Elements between rows; rows of d_k and d_v are contiguous.
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, out_stride = 0, lse_stride = 0;
  int64_t d_out_stride = 0, d_q_stride = 0;  ///< backward
  bool deterministic = false;                ///< backward: bit-identical results in every run
  friend auto operator<=>(const AttentionGraphShape&, const AttentionGraphShape&) = default;
};

/// The tensors of both graphs. Forward reads q, k and v and writes out and lse; backward also reads
/// out, lse and d_out and writes d_q, d_k and d_v, and uses out only for its product with d_out.
/// With equal numbers of query and KV heads, d_k and d_v of a ragged batch have the memory layout
/// of k and v.
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
  d_k_offsets,
  d_v_offsets,
};

using AttentionAddresses = std::map<AttentionTensor, void*>;

class AttentionGraph {
 public:
  virtual ~AttentionGraph() = default;
  virtual int64_t workspace_bytes() const = 0;
  /// Submits one run. `addresses` has all tensors of the graph.
  virtual void execute(const AttentionAddresses& addresses, std::byte* workspace) = 0;
};

class AttentionLibrary {
 public:
  virtual ~AttentionLibrary() = default;
  virtual std::string name() const = 0;
  /// Number of queries per entry from which on even batches get a graph without tables.
  virtual int64_t least_even_queries() const { return std::numeric_limits<int64_t>::max(); }
  /// Whether graphs of a shape multiply, by weights of 0, rows outside all entries that share a
  /// tile with rows of an entry: NaN there would become NaN in the results.
  virtual bool multiplies_masked_rows(const AttentionGraphShape& /*shape*/) { return false; }
  /// Returns nullptr if the library does not support the shape; `problem` then says why.
  virtual std::unique_ptr<AttentionGraph> build(const AttentionGraphShape& shape,
                                                std::string& problem) = 0;
};

}  // namespace gyre
