#pragma once
// What the two passes of fused_linear.hpp share: tiles of the logits.

#include <algorithm>
#include <cstring>

#include "core/index.hpp"
#include "logprobs/fused_linear.hpp"
#include "runtime/gemm.hpp"
#include "runtime/parallel.hpp"

namespace gyre::fused {

inline ConstMatrixRef rows_of(ConstMatrixRef m, int64_t begin, int64_t count) {
  return {m.data + begin * m.stride * static_cast<int64_t>(size_of(m.type)), m.type, count, m.cols,
          m.stride};
}

inline size_t row_bytes(ConstMatrixRef m) {
  return static_cast<size_t>(m.cols) * size_of(m.type);
}

inline void widen_row(ConstMatrixRef from, int64_t row, float* to) {
  if (from.type == DType::f32) {
    std::memcpy(to, from.as<float>().row(row), row_bytes(from));
    return;
  }
  const bf16* source = from.as<bf16>().row(row);
  for (int64_t i = 0; i < from.cols; ++i) to[i] = to_float(source[i]);
}

/// Calls body(begin, count) for parts of [0, columns) that products may be cut into; a column takes
/// `products` multiplications, of 0.02 ns.
template <class Body>
void share_columns(int threads, int64_t columns, int64_t products, Body body) {
  const int64_t panels = ceil_div(columns, gemm_panel_columns);
  const bool shared = items_of_task(columns, 0.02 * static_cast<double>(products)) < columns;
  const int64_t tasks = std::min<int64_t>(shared ? std::max(1, threads) : 1, panels);
  for_each_task(threads, tasks, [&](int64_t task, int) {
    const int64_t begin = panels * task / tasks * gemm_panel_columns;
    const int64_t end = std::min(columns, panels * (task + 1) / tasks * gemm_panel_columns);
    body(begin, end - begin);
  });
}

/// Some rows of X as f32, and the tile of their logits in some columns.
class Tile {
 public:
  Tile(int64_t rows, int64_t columns, int64_t hidden, int threads)
      : threads_(threads), x_(rows * hidden), logits_(rows * columns), hidden_(hidden) {}

  /// token(i): row of x that is row i here.
  template <class Token>
  void load(ConstMatrixRef x, int64_t rows, Token token) {
    rows_ = rows;
    for (int64_t i = 0; i < rows; ++i) widen_row(x, token(i), x_.data() + i * hidden_);
  }
  /// The logits of these rows of the weight.
  MatrixView<float> logits(ConstMatrixRef weight) {
    const MatrixView<float> z = logits_.matrix(rows_, weight.rows);
    share_columns(threads_, z.cols, rows_ * hidden_, [&](int64_t begin, int64_t count) {
      gemm_b_transposed(x(), rows_of(weight, begin, count), z.columns_from(begin, count));
    });
    return z;
  }
  /// d_x <- or += g · weight
  void add_d_x(MatrixView<const float> g, ConstMatrixRef weight, MatrixView<float> d_x,
               bool accumulate) const {
    share_columns(threads_, hidden_, g.rows * g.cols, [&](int64_t begin, int64_t count) {
      gemm(g, weight.columns_from(begin, count), d_x.columns_from(begin, count), accumulate);
    });
  }
  /// d_weight += gᵀ · x
  void add_d_weight(MatrixView<const float> g, MatrixView<float> d_weight) const {
    share_columns(threads_, hidden_, g.rows * g.cols, [&](int64_t begin, int64_t count) {
      gemm_a_transposed(g, x().columns_from(begin, count), d_weight.columns_from(begin, count),
                        true);
    });
  }

 private:
  MatrixView<const float> x() const { return x_.matrix(rows_, hidden_); }

  int threads_;
  Buffer<float> x_, logits_;
  int64_t hidden_, rows_ = 0;
};

}  // namespace gyre::fused

namespace gyre {

/// Calls body(first column, their rows of the weight) for each tile of this rank's valid columns.
template <class Body>
void FusedLinear::for_each_column_tile(ConstMatrixRef weight, Body body) const {
  const int64_t columns = vocab_.valid(tp_.rank());
  for (int64_t c = 0; c < columns; c += options_.tile_columns)
    body(c, fused::rows_of(weight, c, std::min(options_.tile_columns, columns - c)));
}

}  // namespace gyre
