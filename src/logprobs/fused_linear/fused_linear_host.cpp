// Host products and row moves of the fused linear layer.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/index.hpp"
#include "logprobs/fused_linear/fused_linear_cuda.hpp"
#include "logprobs/fused_linear/fused_linear_detail.hpp"
#include "runtime/gemm.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

void widen_row(ConstMatrixRef from, int64_t row, float* to) {
  if (from.type == DType::f32) {
    std::memcpy(to, from.as<float>().row(row), fused::row_bytes(from));
    return;
  }
  const bf16* source = from.as<bf16>().row(row);
  for (int64_t i = 0; i < from.cols; ++i) to[i] = to_float(source[i]);
}

/// Calls body(begin, count) for ranges that cover [0, columns), distributed over threads and split
/// where the matrix product may be; a column takes `products` multiplications of 0.02 ns each.
template <class Body>
void share_columns(int threads, int64_t columns, int64_t products, Body body) {
  const int64_t panels = ceil_div(columns, gemm_panel_columns);
  const bool shared = items_of_task(columns, 0.02 * products) < columns;
  const int64_t tasks = std::min<int64_t>(shared ? std::max(1, threads) : 1, panels);
  for_each_task(threads, tasks, [&](int64_t task, int) {
    const int64_t begin = panels * task / tasks * gemm_panel_columns;
    const int64_t end = std::min(columns, panels * (task + 1) / tasks * gemm_panel_columns);
    body(begin, end - begin);
  });
}

/// Rows are widened to f32; a gradient overwrites its logits.
class HostTile final : public LinearTile {
 public:
  HostTile(TileSize most, int64_t hidden, int threads)
      : threads_(threads),
        x_(most.rows * hidden),
        memory_(most.rows * most.columns),
        hidden_(hidden) {}

  void load(ConstMatrixRef x, int64_t first, int64_t rows) override {
    rows_ = rows;
    for (int64_t i = 0; i < rows; ++i) widen_row(x, first + i, x_.data() + i * hidden_);
  }
  void load_listed(ConstMatrixRef x, const int32_t* numbers, int64_t rows) override {
    rows_ = rows;
    for (int64_t i = 0; i < rows; ++i) widen_row(x, numbers[i], x_.data() + i * hidden_);
  }
  MatrixView<float> logits(ConstMatrixRef weight) override {
    weight_ = weight;
    const MatrixView<float> z = tile();
    share_columns(threads_, z.cols, rows_ * hidden_, [&](int64_t begin, int64_t count) {
      gemm_b_transposed(x(), weight.rows_from(begin, count), z.columns_from(begin, count));
    });
    return z;
  }
  MatrixRef gradient() override { return tile(); }
  void add_d_x(MatrixView<float> d_x, bool accumulate) override {
    const MatrixView<const float> g = tile();
    share_columns(threads_, hidden_, g.rows * g.cols, [&](int64_t begin, int64_t count) {
      gemm(g, weight_.columns_from(begin, count), d_x.columns_from(begin, count), accumulate);
    });
  }
  void add_d_weight(MatrixView<float> d_weight) override {
    const MatrixView<const float> g = tile();
    share_columns(threads_, hidden_, g.rows * g.cols, [&](int64_t begin, int64_t count) {
      gemm_a_transposed(g, x().columns_from(begin, count), d_weight.columns_from(begin, count),
                        true);
    });
  }

 private:
  MatrixView<const float> x() const { return x_.matrix(rows_, hidden_); }
  MatrixView<float> tile() { return memory_.matrix(rows_, weight_.rows); }

  int threads_;
  Buffer<float> x_, memory_;
  int64_t hidden_, rows_ = 0;
  ConstMatrixRef weight_;
};

class HostLinearOps final : public LinearOps {
 public:
  explicit HostLinearOps(RowKernels& kernels) : kernels_(kernels) {}

  MemorySpace space() const override { return MemorySpace::host; }
  RowKernels& row_kernels() override { return kernels_; }
  std::unique_ptr<LinearTile> make_tile(TileSize most, int64_t hidden, DType, DType,
                                        int threads) override {
    return std::make_unique<HostTile>(most, hidden, threads);
  }

  Buffer<int32_t> upload(std::span<const int32_t> numbers) override {
    Buffer<int32_t> copied(std::ssize(numbers));
    std::ranges::copy(numbers, copied.data());
    return copied;
  }
  void copy(ConstMatrixRef from, MatrixRef to) override {
    for (int64_t r = 0; r < from.rows; ++r)
      std::memcpy(to.rows_from(r, 1).data, from.rows_from(r, 1).data, fused::row_bytes(from));
  }
  void scatter(MatrixView<const float> from, const int32_t* numbers,
               MatrixView<float> to) override {
    for (int64_t r = 0; r < from.rows; ++r) std::copy_n(from.row(r), from.cols, to.row(numbers[r]));
  }
  void add(MatrixView<const float> from, MatrixView<float> to) override {
    for (int64_t r = 0; r < from.rows; ++r)
      for (int64_t i = 0; i < from.cols; ++i) to(r, i) += from(r, i);
  }
  void fill_zero(MatrixView<float> to) override {
    for (int64_t r = 0; r < to.rows; ++r) std::fill_n(to.row(r), to.cols, 0.0F);
  }
  void soft_cap(MatrixView<float> z, float cap) override {
    for (int64_t r = 0; r < z.rows; ++r)
      for (int64_t i = 0; i < z.cols; ++i) z(r, i) = cap * std::tanh(z(r, i) / cap);
  }

 private:
  RowKernels& kernels_;
};

}  // namespace

TileSize usual_tile(MemorySpace space) {
  // Device: products of 64 MiB of logits fill a large device and outweigh their overhead; not
  // measured. Host: each tile packs its part of the weight, which 512 rows repay less well (3 to 6
  // % slower in a pass of SmolLM2).
  return space == MemorySpace::device ? TileSize{2048, 8192} : TileSize{1024, 1024};
}

LinearOps& cpu_linear_ops() {
  static HostLinearOps ops(cpu_row_kernels());
  return ops;
}

std::unique_ptr<LinearOps> make_linear_ops(Stream& stream, RowKernels& kernels) {
  if (stream.space() == MemorySpace::device) return make_cuda_linear_ops(stream, kernels);
  return std::make_unique<HostLinearOps>(kernels);
}

}  // namespace gyre
