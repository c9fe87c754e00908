#pragma once
// Attention of one array of queries to one array of keys and values, accumulated over calls.
//
// Forward, for query row i and head h, over the visible keys j of the rectangles:
//     x_ij = scale · <q_i, k_j>,  O_i = Σ exp(x_ij - LSE_i) v_j,  LSE_i = log Σ exp(x_ij)
// merged with the previous (O, LSE): merge.hpp. Backward, with the LSE of the whole row and delta_i
// = <O_i, dO_i> (Dao, arXiv 2307.08691, algorithm 2):
//     p = exp(x_ij - LSE_i)      dv_j += p · dO_i      ds = p · (<dO_i, v_j> - delta_i)
//     dq_i += scale · ds · k_j   dk_j += scale · ds · q_i
// Gradients of blocks can thus be added in any order. Sums are kept in f32 for all element types.

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "attention/rectangle.hpp"
#include "core/matrix_ref.hpp"

namespace gyre {

/// Heads of an attention. Query head h reads KV head h / (heads / kv_heads).
struct HeadShape {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;    ///< elements of a head of Q and K
  float scale = 0;         ///< usually head_dim^-0.5
  int64_t v_head_dim = 0;  ///< elements of a head of V and out; 0: head_dim
  /// Number of elements at the end of a head of K that are the same in all KV heads (the rotary
  /// part of multi-head latent attention). In memory every head has them; a message has them once.
  int64_t shared_key_dim = 0;
  constexpr int64_t value_dim() const { return v_head_dim == 0 ? head_dim : v_head_dim; }
  int64_t own_key_dim() const { return head_dim - shared_key_dim; }
  int64_t group() const { return heads / kv_heads; }
};

/// keys [kv_heads · head_dim]: copies the shared elements of the first head to the others.
inline void share_keys(const HeadShape& shape, std::span<float> keys) {
  for (int64_t head = 1; head < shape.kv_heads; ++head)
    for (int64_t i = shape.own_key_dim(); i < shape.head_dim; ++i)
      keys[head * shape.head_dim + i] = keys[i];
}

/// Heads of one call, possibly a part of the attention's heads: query head i of the arrays reads KV
/// head (i + skew) / group of the arrays, where skew < group.
struct BlockHeads {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t group = 1;
  int64_t skew = 0;
  float scale = 0;
  int64_t v_head_dim = 0;  ///< as in HeadShape
  constexpr int64_t value_dim() const { return v_head_dim == 0 ? head_dim : v_head_dim; }
  /// Query heads [head_begin(kv), head_end(kv)) read KV head kv.
  int64_t head_begin(int64_t kv_head) const { return std::max<int64_t>(0, kv_head * group - skew); }
  int64_t head_end(int64_t kv_head) const { return std::min(heads, (kv_head + 1) * group - skew); }
};

/// Inputs of both passes. Matrices are f32 or bf16; q, k, v (and d_out) have the same type.
struct BlockInput {
  BlockHeads heads;
  ConstMatrixRef q;  ///< [rows, heads · head_dim]
  ConstMatrixRef k;  ///< [keys, kv_heads · head_dim]
  ConstMatrixRef v;  ///< [keys, kv_heads · value_dim]
  /// Sorted by q_begin; the rectangles of one query are disjoint in keys.
  std::span<const Rectangle> rectangles;
  /// Whether tiles are counted from the corners of rectangles. The bits of a row (O and dQ: a
  /// query; dK and dV: a key) then depend only on its own rectangle, not on other rows of its tile
  /// or on how rows are distributed over calls.
  bool fixed_tiles = false;
  /// Called between tiles to advance communication; may be empty.
  std::function<void()> progress = {};
};

struct ForwardBlock : BlockInput {
  MatrixRef out;          ///< [rows, heads · value_dim], f32 or bf16, normalised
  MatrixView<float> lse;  ///< [rows, heads]; -inf: no key seen yet, out is 0
  /// Overwrites all rows of out and lse without reading them (BLAS: beta = 0); a query without
  /// visible keys gets (0, -inf). Otherwise merges into them. Requires can_overwrite().
  bool overwrite = false;
};

/// An empty output matrix means that its gradient is not computed.
struct BackwardBlock : BlockInput {
  ConstMatrixRef d_out = {};             ///< [rows, heads · value_dim]
  MatrixView<const float> lse = {};      ///< [rows, heads]; -inf: the row has no gradient
  MatrixView<const float> delta = {};    ///< [rows, heads]
  MatrixRef d_q = {};                    ///< [rows, heads · head_dim], f32 or bf16, added to
  MatrixView<float> d_k = {}, d_v = {};  ///< shapes of k and v, added to; both or none
  /// Output of the forward pass, with delta = <out, d_out>; may be empty. If given, a kernel may
  /// compute delta itself, and may assume a finite lse for every row with a visible key in a
  /// rectangle.
  ConstMatrixRef out = {};
  /// If set, a kernel that asks_for_delta() calls it before it reads delta; further calls do
  /// nothing.
  std::function<void()> make_delta = {};
  /// Overwrites all rows of d_q, or of d_k and d_v, instead of adding to them, as in ForwardBlock.
  bool overwrite_d_q = false, overwrite_d_kv = false;
};

/// Values that a kernel rounds to bf16 inside its calls, even if the arrays are f32.
struct KernelPrecision {
  bool narrow_weights =
      false;  ///< softmax weights p and their gradients ds, as factors of products
  bool narrow_results = false;  ///< what a call merges into out or adds to gradients
};

class BlockKernel {
 public:
  virtual ~BlockKernel() = default;
  virtual void forward(const ForwardBlock& block) = 0;
  virtual void backward(const BackwardBlock& block) = 0;
  /// Whether calls may set `overwrite`, which avoids clearing the outputs before the call and
  /// reading them in it.
  virtual bool can_overwrite() const { return false; }
  /// Whether calls may set `make_delta`, which saves delta where the kernel reads `out` instead.
  virtual bool asks_for_delta() const { return false; }
  /// Precision for queries, keys and values of this type.
  virtual KernelPrecision precision(DType /*activations*/) const { return {}; }
  /// A remark for reports about the calls so far, e.g. the number of rectangles that another kernel
  /// computed; may be empty.
  virtual std::string note() const { return ""; }
};

/// A kernel for CPUs: tiled and vectorised (AVX2 or AVX-512, chosen at run time), with matrix
/// products by libxsmm and online softmax by Highway. `threads` > 1: OpenMP threads share the
/// tiles; results do not depend on their number.
std::unique_ptr<BlockKernel> make_cpu_kernel(int threads = 1);
/// Serial double-precision reference: loops over queries and their visible keys, in order.
std::unique_ptr<BlockKernel> make_reference_kernel();

}  // namespace gyre
