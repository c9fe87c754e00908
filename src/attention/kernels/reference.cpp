#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/merge.hpp"
#include "core/special_values.hpp"

namespace gyre {
namespace {

double value(ConstMatrixRef m, int64_t row, int64_t col) {
  return m.at(row, col);
}

void store(MatrixRef m, int64_t row, int64_t col, double x) {
  const auto rounded = static_cast<float>(x);
  if (m.type == DType::f32)
    m.as<float>()(row, col) = rounded;
  else
    m.as<bf16>()(row, col) = to_bf16(rounded);
}

/// A row and head of queries, with the first columns of its heads: in q and d_q, out and d_out, k
/// and d_k, v and d_v.
struct Query {
  int64_t row, head, q, out, k, v;
};

/// Calls body(query) for every head of every query row that a rectangle covers, in row order.
template <class Body>
void for_each_query(const BlockInput& in, Body body) {
  const BlockHeads& h = in.heads;
  for (int64_t row = 0; row < in.q.rows; ++row) {
    const bool covered = std::any_of(
        in.rectangles.begin(), in.rectangles.end(),
        [&](const Rectangle& r) { return row >= r.q_begin && row < r.q_begin + r.q_length; });
    if (!covered) continue;
    for (int64_t head = 0; head < h.heads; ++head) {
      const int64_t kv_head = (head + h.skew) / h.group;
      body({row, head, head * h.head_dim, head * h.value_dim(), kv_head * h.head_dim,
            kv_head * h.value_dim()});
    }
    if (in.progress) in.progress();
  }
}

/// Calls body(key row, score) for every key that the query sees, in order of rectangles and keys.
template <class Body>
void for_each_key(const BlockInput& in, const Query& query, Body body) {
  for (const Rectangle& r : in.rectangles) {
    const int64_t i = query.row - r.q_begin;
    if (i < 0 || i >= r.q_length) continue;
    const int64_t begin = std::max<int64_t>(r.mask.begin_key(i), 0);
    const int64_t end = std::min(r.mask.end_key(i), r.k_length);
    for (int64_t j = begin; j < end; ++j) {
      const int64_t key = r.k_begin + j;
      double dot = 0;
      for (int64_t d = 0; d < in.heads.head_dim; ++d)
        dot += value(in.q, query.row, query.q + d) * value(in.k, key, query.k + d);
      body(key, dot * in.heads.scale);
    }
  }
}

/// Adds `sums` [keys, columns of to] to the rows of `to` that a rectangle covers.
void add_to_keys(const BlockInput& in, const std::vector<double>& sums, MatrixView<float> to) {
  std::vector<bool> covered(in.k.rows);
  for (const Rectangle& r : in.rectangles)
    for (int64_t j = 0; j < r.k_length; ++j) covered[r.k_begin + j] = true;
  for (int64_t key = 0; key < in.k.rows; ++key) {
    if (!covered[key]) continue;
    for (int64_t c = 0; c < to.cols; ++c)
      to(key, c) = static_cast<float>(to(key, c) + sums[key * to.cols + c]);
  }
}

class ReferenceKernel final : public BlockKernel {
 public:
  void forward(const ForwardBlock& block) override {
    for_each_query(block, [&](const Query& query) { attend(block, query); });
  }

  void backward(const BackwardBlock& block) override {
    const bool keys_wanted = block.d_k.data != nullptr;
    const size_t rows = keys_wanted ? block.k.rows : 0;
    std::vector<double> d_k(rows * block.k.cols), d_v(rows * block.v.cols);
    for_each_query(block, [&](const Query& query) {
      if (block.lse(query.row, query.head) != -infinity_of<double>)
        differentiate(block, query, d_k, d_v);
    });
    if (!keys_wanted) return;
    add_to_keys(block, d_k, block.d_k);
    add_to_keys(block, d_v, block.d_v);
  }

 private:
  /// Merges each visible key as a partial result of its own: (O, LSE) = (v_j, x_ij).
  static void attend(const ForwardBlock& block, const Query& query) {
    const int64_t dim = block.heads.value_dim();
    std::vector<double> out(dim);
    for (int64_t d = 0; d < dim; ++d) out[d] = value(block.out, query.row, query.out + d);
    double lse = block.lse(query.row, query.head);
    bool seen = false;
    for_each_key(block, query, [&](int64_t key, double score) {
      const MergeWeights<double> w = merge_lse(lse, score);
      for (int64_t d = 0; d < dim; ++d) {
        const size_t at = d;
        out[at] = w.w1 * out[at] + w.w2 * value(block.v, key, query.v + d);
      }
      lse = w.lse;
      seen = true;
    });
    if (!seen) return;
    for (int64_t d = 0; d < dim; ++d) store(block.out, query.row, query.out + d, out[d]);
    block.lse(query.row, query.head) = static_cast<float>(lse);
  }

  /// Adds to d_q of the query, and to d_k and d_v, of the shapes of k and v, unless empty.
  static void differentiate(const BackwardBlock& block, const Query& query,
                            std::vector<double>& d_k, std::vector<double>& d_v) {
    const int64_t dim = block.heads.head_dim, value_dim = block.heads.value_dim();
    const double scale = block.heads.scale;
    const double lse = block.lse(query.row, query.head);
    const double delta = block.delta(query.row, query.head);
    std::vector<double> d_q(dim);
    for_each_key(block, query, [&](int64_t key, double score) {
      const double p = std::exp(score - lse);
      double dp = 0;
      for (int64_t d = 0; d < value_dim; ++d)
        dp += value(block.d_out, query.row, query.out + d) * value(block.v, key, query.v + d);
      const double ds = scale * p * (dp - delta);
      for (int64_t d = 0; d < dim; ++d) {
        d_q[d] += ds * value(block.k, key, query.k + d);
        if (!d_k.empty())
          d_k[key * block.k.cols + query.k + d] += ds * value(block.q, query.row, query.q + d);
      }
      if (d_v.empty()) return;
      for (int64_t d = 0; d < value_dim; ++d)
        d_v[key * block.v.cols + query.v + d] += p * value(block.d_out, query.row, query.out + d);
    });
    if (block.d_q.empty()) return;
    for (int64_t d = 0; d < dim; ++d)
      store(block.d_q, query.row, query.q + d, value(block.d_q, query.row, query.q + d) + d_q[d]);
  }
};

}  // namespace

std::unique_ptr<BlockKernel> make_reference_kernel() {
  return std::make_unique<ReferenceKernel>();
}

}  // namespace gyre
