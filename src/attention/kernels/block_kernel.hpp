#pragma once
// Attention of one array of queries against one array of keys and values, accumulated.
//
// Forward, for query row i, head h, over the keys j that the rectangles let it see:
//     x_ij = scale · <q_i, k_j>,  O_i = Σ exp(x_ij - LSE_i) v_j,  LSE_i = log Σ exp(x_ij)
// merged with what (O, LSE) held before: merge.hpp. Backward, with the LSE of the whole row and
// delta_i = <O_i, dO_i> (Dao, arXiv 2307.08691, algorithm 2):
//     p = exp(x_ij - LSE_i)      dv_j += p · dO_i      ds = p · (<dO_i, v_j> - delta_i)
//     dq_i += scale · ds · k_j   dk_j += scale · ds · q_i
// so that the gradients of blocks simply add up, in any order. Sums are kept in f32 whatever the
// arrays are.

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
  int64_t head_dim = 0;
  float scale = 0;  ///< usually head_dim^-0.5
  int64_t group() const { return heads / kv_heads; }
};

/// The heads of one call, which may be a part of an attention's: query head i of the arrays reads
/// KV head (i + skew) / group of the arrays, with skew < group.
struct BlockHeads {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t group = 1;
  int64_t skew = 0;
  float scale = 0;
  /// Query heads [head_begin(kv), head_end(kv)) read KV head kv.
  int64_t head_begin(int64_t kv_head) const { return std::max<int64_t>(0, kv_head * group - skew); }
  int64_t head_end(int64_t kv_head) const { return std::min(heads, (kv_head + 1) * group - skew); }
};

/// What both directions read. Matrices are [rows, heads · head_dim] or [rows, kv_heads · head_dim],
/// f32 or bf16, all of q, k, v (and d_out) of one type.
struct BlockInput {
  BlockHeads heads;
  ConstMatrixRef q, k, v;
  /// Sorted by q_begin; the rectangles of one query are disjoint in keys.
  std::span<const Rectangle> rectangles;
  /// Counts tiles from the corners of rectangles. Then the bits of a row (of O and dQ: a query; of
  /// dK and dV: a key) depend on its own rectangle only, not on the other rows of its tile, nor on
  /// how rows are distributed over calls.
  bool fixed_tiles = false;
  /// Called between tiles, so that communication under way can advance; may be empty.
  std::function<void()> progress = {};
};

struct ForwardBlock : BlockInput {
  MatrixRef out;          ///< [rows, heads · head_dim], f32 or bf16, normalised
  MatrixView<float> lse;  ///< [rows, heads]; -inf: nothing seen yet, out is 0
  /// Overwrites out and lse, whose old values are not read (BLAS: beta = 0): all rows of both, with
  /// (0, -inf) for a query that sees no key. Otherwise merges into them. For kernels with
  /// can_overwrite().
  bool overwrite = false;
};

/// An output matrix may be empty: then that gradient is not computed.
struct BackwardBlock : BlockInput {
  ConstMatrixRef d_out = {};             ///< [rows, heads · head_dim]
  MatrixView<const float> lse = {};      ///< [rows, heads]; -inf: the row has no gradient
  MatrixView<const float> delta = {};    ///< [rows, heads]
  MatrixRef d_q = {};                    ///< [rows, heads · head_dim], f32 or bf16, added to
  MatrixView<float> d_k = {}, d_v = {};  ///< [keys, kv_heads · head_dim], added to; both or none
  /// The output of the forward pass, of which delta = <out, d_out>, if the caller has it; else
  /// empty. A kernel may then compute delta itself, and may assume a finite lse for every row that
  /// sees a key in a rectangle.
  ConstMatrixRef out = {};
  /// Overwrites all rows of d_q, or of d_k and d_v, instead of adding to them, as in ForwardBlock.
  bool overwrite_d_q = false, overwrite_d_kv = false;
};

/// What a kernel rounds to bf16 inside its calls, even if the arrays are f32.
struct KernelPrecision {
  bool narrow_weights =
      false;  ///< softmax weights p and their gradients ds, as factors of products
  bool narrow_results = false;  ///< what a call merges into out, and adds to gradients
};

class BlockKernel {
 public:
  virtual ~BlockKernel() = default;
  virtual void forward(const ForwardBlock& block) = 0;
  virtual void backward(const BackwardBlock& block) = 0;
  /// Whether calls may set `overwrite`, which saves clearing the outputs before the call and
  /// reading them in it.
  virtual bool can_overwrite() const { return false; }
  /// For arrays of queries, keys and values of a type.
  virtual KernelPrecision precision(DType /*activations*/) const { return {}; }
  /// A remark for reports about the calls so far, such as how many rectangles another kernel
  /// computed; empty: none.
  virtual std::string note() const { return ""; }
};

/// Tiled, vectorised (AVX2 or AVX-512 chosen at run time): matrix products by libxsmm, online
/// softmax by Highway. `threads` > 1: tiles are shared among OpenMP threads; results do not depend
/// on their number.
std::unique_ptr<BlockKernel> make_cpu_kernel(int threads = 1);
/// Serial, double-precision twin: loops over queries and their visible keys, in order.
std::unique_ptr<BlockKernel> make_reference_kernel();

}  // namespace gyre
