#pragma once
// Attention of one rank's queries against one KV block, accumulated.

#include <functional>
#include <memory>
#include <span>

#include "attention/plan.hpp"
#include "core/view.hpp"

namespace gyre {

/// Heads of this rank. Query head h reads key head h / (heads / kv_heads).
struct HeadShape {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 0;  ///< usually head_dim^-0.5
};

/// Running result over all keys seen so far. A row that has seen none is (O = 0, LSE = -inf), the
/// identity of merging.
struct AttentionState {
  MatrixView<float> out;  ///< [queries, heads * head_dim], normalised
  MatrixView<float> lse;  ///< [queries, heads], natural logarithm
};

/// One KV block: keys [tokens, kv_heads * head_dim], values likewise.
struct KvBlock {
  MatrixView<const float> keys;
  MatrixView<const float> values;
};

class BlockKernel {
 public:
  virtual ~BlockKernel() = default;
  /// Sets every row of `state` to the identity.
  virtual void reset(AttentionState& state) const;
  /// Attends `queries` [queries, heads * head_dim] to `block` under the rectangles (sorted by
  /// q_begin; the rectangles of one query are disjoint in keys) and merges into `state`. `progress`
  /// is called between tiles, so that communication under way can advance.
  virtual void forward(const HeadShape& shape, MatrixView<const float> queries,
                       const KvBlock& block, std::span<const Rectangle> rectangles,
                       AttentionState& state, const std::function<void()>& progress) = 0;
};

/// Tiled, vectorised (AVX2 or AVX-512 chosen at run time), f32: matrix products by libxsmm, online
/// softmax by Highway.
std::unique_ptr<BlockKernel> make_cpu_kernel();
/// Serial, double-precision twin: for every query and visible key, in order, merged with merge_lse.
std::unique_ptr<BlockKernel> make_reference_kernel();

}  // namespace gyre
