#pragma once
// Attention of short documents on the CPU: rectangles with so few keys that all scores of some rows
// are kept until their softmax is complete. one_pass.cpp describes the loops.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/kernels/one_pass_ops.hpp"
#include "attention/kernels/progress.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Largest numbers of rows and keys of a rectangle for the one-pass method.
constexpr int64_t one_pass_rows = 256, one_pass_keys = 256;

/// Rectangles of a call, split by method.
struct OnePassSplit {
  std::vector<Rectangle> one_pass, others;  ///< in the order of the call
  bool keys_apart = true;                   ///< no two rectangles of one_pass share a key
};
/// Selects small rectangles that share no queries with others. Selects none with fixed tiles or
/// with a scale that is not positive.
OnePassSplit split_one_pass(const BlockInput& in);

/// Scratch arrays of one thread, and the loops over the heads of a rectangle.
class OnePassWorker {
 public:
  void start(int64_t head_dim, int64_t value_dim, Progress progress);
  /// Computes the query heads of KV heads [kv_begin, kv_end) for several rectangles.
  void forward(const ForwardBlock& block, std::span<const Rectangle> rectangles, int64_t kv_begin,
               int64_t kv_end);
  void backward(const BackwardBlock& block, std::span<const Rectangle> rectangles, int64_t kv_begin,
                int64_t kv_end);

 private:
  struct Position;
  template <class Body>
  void for_each_head(const BlockInput& in, std::span<const Rectangle> rectangles, int64_t kv_begin,
                     int64_t kv_end, Body body);
  void set_limits(const Rectangle& r);
  OnePassTile tile(const BlockInput& in, const Rectangle& r, int64_t row, int64_t rows) const;
  /// Copies rows of one head to a panel.
  static void load_panel(ConstMatrixRef from, int64_t row, int64_t count, int64_t head,
                         const HeadWidth& width, Buffer<float>& panel, int64_t capacity);
  static HeadRows<const float> rows_of(ConstMatrixRef from, int64_t row, int64_t column);
  static HeadRows<const float> panel_of(const Buffer<float>& panel, const HeadWidth& width);
  static bool needs_no_panel(ConstMatrixRef from, int64_t count, const HeadWidth& width);
  void load_keys(const BlockInput& in, const Rectangle& r, int64_t kv_head, bool backward);
  void load_gradient_rows(const BackwardBlock& block, int64_t row, int64_t rows, int64_t head);
  static HeadRows<float> open_gradients(MatrixView<float> result, const Rectangle& r,
                                        int64_t kv_head, const HeadWidth& width,
                                        Buffer<float>& panel);
  static void close_gradients(MatrixView<float> result, const Rectangle& r, int64_t kv_head,
                              const HeadWidth& width, const Buffer<float>& panel);

  HeadWidth of_keys_{}, of_values_{};
  Progress progress_;
  std::vector<int32_t> begin_, end_;           ///< [rows] keys that each row sees
  Buffer<float> k_, v_, d_k_, d_v_;            ///< [one_pass_keys][padded]
  Buffer<float> k_transposed_, v_transposed_;  ///< [dim][columns]
  Buffer<float> q_, d_out_, out_;              ///< [tile rows][padded]
  /// Location of rows: in their arrays, or in the panels above.
  OnePassKeys keys_{}, values_{};
  HeadRows<const float> q_rows_{}, d_out_rows_{};
  Buffer<float> scores_, d_scores_;  ///< [tile rows][columns]
  Buffer<float> sums_;               ///< [one_pass_strip][padded]
  Buffer<float> lse_, delta_;        ///< [tile rows]
};

}  // namespace gyre
