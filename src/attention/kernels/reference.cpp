#include <cmath>
#include <limits>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/merge.hpp"

namespace gyre {
namespace {

class ReferenceKernel final : public BlockKernel {
 public:
  void forward(const HeadShape& shape, MatrixView<const float> queries, const KvBlock& block,
               std::span<const Rectangle> rectangles, AttentionState& state,
               const std::function<void()>& progress) override {
    for (const Rectangle& r : rectangles) {
      for (int64_t i = 0; i < r.q_length; ++i)
        for (int64_t head = 0; head < shape.heads; ++head)
          attend(shape, queries, block, r, i, head, state);
      if (progress) progress();
    }
  }

 private:
  /// Query i of the rectangle, one head: keys in order, each merged as a partial of its own, (v_j,
  /// s_j).
  static void attend(const HeadShape& shape, MatrixView<const float> queries, const KvBlock& block,
                     const Rectangle& r, int64_t i, int64_t head, AttentionState& state) {
    const int64_t row = r.q_begin.value() + i, dim = shape.head_dim;
    const int64_t kv_column = head / (shape.heads / shape.kv_heads) * dim;
    const float* q = queries.row(row) + head * dim;
    float* out = state.out.row(row) + head * dim;
    std::vector<double> sum(out, out + dim);
    auto lse = static_cast<double>(state.lse(row, head));
    for (int64_t j = 0; j < r.k_length; ++j) {
      if (r.mask.causal && j > i + r.mask.diagonal) break;
      const float* k = block.keys.row(r.k_begin.value() + j) + kv_column;
      const float* v = block.values.row(r.k_begin.value() + j) + kv_column;
      double score = 0;
      for (int64_t d = 0; d < dim; ++d)
        score += static_cast<double>(q[d]) * static_cast<double>(k[d]);
      const MergeWeights<double> w = merge_lse(lse, score * static_cast<double>(shape.scale));
      for (int64_t d = 0; d < dim; ++d) {
        const auto at = static_cast<size_t>(d);
        sum[at] = w.w1 * sum[at] + w.w2 * static_cast<double>(v[d]);
      }
      lse = w.lse;
    }
    for (int64_t d = 0; d < dim; ++d) out[d] = static_cast<float>(sum[static_cast<size_t>(d)]);
    state.lse(row, head) = static_cast<float>(lse);
  }
};

}  // namespace

std::unique_ptr<BlockKernel> make_reference_kernel() {
  return std::make_unique<ReferenceKernel>();
}

}  // namespace gyre
