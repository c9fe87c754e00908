// One block per row: a decoder has thousands of rows of a few thousand elements.

#include <vector>

#include "core/error.hpp"
#include "model/cuda_decoder_ops.hpp"
#include "model/elementwise_math.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_gemm.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"

namespace gyre {
namespace {

constexpr int threads = 256;

/// A row-major matrix; block b works on row b.
struct Rows {
  float* data;
  int64_t stride, cols;
  __device__ float* mine() const { return data + blockIdx.x * stride; }
};
struct ConstRows {
  const float* data;
  int64_t stride, cols;
  __device__ const float* mine() const { return data + blockIdx.x * stride; }
};
Rows rows_of(MatrixView<float> x) {
  return {x.data, x.stride, x.cols};
}
ConstRows rows_of(MatrixView<const float> x) {
  return {x.data, x.stride, x.cols};
}

/// Sum over the `threads` threads of the block; every thread gets the same bits.
__device__ float block_sum(float x) {
  constexpr int warps = threads / warp_lanes;
  __shared__ float sums[warps];
  const float of_warp = warp_sum(x);
  if (threadIdx.x % warp_lanes == 0) sums[threadIdx.x / warp_lanes] = of_warp;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < warps; ++w) sum += sums[w];
  return sum;
}

__global__ void __launch_bounds__(threads)
    embed_kernel(const int32_t* tokens, ConstRows table, int64_t table_rows, int64_t first,
                 Rows out) {
  const int64_t row = tokens[blockIdx.x] - first;
  const bool here = row >= 0 && row < table_rows;
  float* to = out.mine();
  for (int64_t c = threadIdx.x; c < out.cols; c += threads)
    to[c] = here ? table.data[row * table.stride + c] : 0.0F;
}

__global__ void __launch_bounds__(threads)
    add_rms_norm_kernel(Rows x, ConstRows y, const float* weight, float eps, Rows h) {
  float* mine = x.mine();
  float squares = 0;
  for (int64_t c = threadIdx.x; c < x.cols; c += threads) {
    float value = mine[c];
    if (y.data != nullptr) mine[c] = value += y.mine()[c];
    squares += value * value;
  }
  const float scale = rms_scale(block_sum(squares), x.cols, eps);
  float* to = h.mine();
  // Each thread reads only what it wrote itself, so no barrier is needed.
  for (int64_t c = threadIdx.x; c < x.cols; c += threads) to[c] = mine[c] * scale * weight[c];
}

__global__ void __launch_bounds__(threads) add_kernel(Rows x, ConstRows y) {
  float* to = x.mine();
  const float* from = y.mine();
  for (int64_t c = threadIdx.x; c < x.cols; c += threads) to[c] += from[c];
}

__global__ void __launch_bounds__(threads) add_bias_kernel(Rows x, const float* bias) {
  float* to = x.mine();
  for (int64_t c = threadIdx.x; c < x.cols; c += threads) to[c] += bias[c];
}

/// One warp for each head.
__global__ void __launch_bounds__(threads)
    head_norm_kernel(Rows x, int64_t head_dim, const float* weight, float eps) {
  const int64_t lane = threadIdx.x % warp_lanes;
  for (int64_t head = threadIdx.x / warp_lanes; head < x.cols / head_dim;
       head += threads / warp_lanes) {
    float* mine = x.mine() + head * head_dim;
    float squares = 0;
    for (int64_t c = lane; c < head_dim; c += warp_lanes) squares += mine[c] * mine[c];
    const float scale = rms_scale(warp_sum(squares), head_dim, eps);
    for (int64_t c = lane; c < head_dim; c += warp_lanes) mine[c] = mine[c] * scale * weight[c];
  }
}

__global__ void __launch_bounds__(threads) silu_multiply_kernel(Rows gate, ConstRows up) {
  float* to = gate.mine();
  const float* from = up.mine();
  for (int64_t c = threadIdx.x; c < gate.cols; c += threads) to[c] = silu_product(to[c], from[c]);
}

/// Rotates the pairs (i, i + half) of all heads of one row.
__device__ void rotate(float* row, int64_t cols, int64_t head_dim, int64_t half,
                       const Rotation* rotations) {
  for (int64_t e = threadIdx.x; e < cols / head_dim * half; e += threads) {
    const int64_t pair = e % half;
    float* low = row + e / half * head_dim + pair;
    const float a = low[0], b = low[half];
    low[0] = rotations[pair].low(a, b);
    low[half] = rotations[pair].high(a, b);
  }
}

/// turns [half]; dynamic shared memory: half rotations.
__global__ void __launch_bounds__(threads)
    rope_kernel(const int32_t* positions, const double* turns, float scale, int64_t head_dim,
                int64_t half, Rows q, Rows k) {
  auto* rotations = reinterpret_cast<Rotation*>(dynamic_shared());
  for (int64_t i = threadIdx.x; i < half; i += threads)
    rotations[i] = rope_rotation(positions[blockIdx.x], turns[i], scale);
  __syncthreads();
  rotate(q.mine(), q.cols, head_dim, half, rotations);
  rotate(k.mine(), k.cols, head_dim, half, rotations);
}

class CudaDecoderOps final : public DecoderOps {
 public:
  explicit CudaDecoderOps(Stream& stream) : stream_(stream) {}

  void set_slots(std::span<const int32_t> tokens, std::span<const int32_t> positions) override {
    upload(tokens, tokens_);
    upload(positions, positions_);
    slots_ = std::ssize(tokens);
  }

  void embed(MatrixView<const float> table, int64_t first, MatrixView<float> out) override {
    check_rows(out, slots_, table.cols);
    launch(for_each_row(out), embed_kernel, tokens_.data(), rows_of(table), table.rows, first,
           rows_of(out));
  }
  void add_rms_norm(MatrixView<float> x, MatrixView<const float> y, const float* weight, float eps,
                    MatrixView<float> h) override {
    if (y.data != nullptr) check_rows(y, x.rows, x.cols);
    check_rows(h, x.rows, x.cols);
    launch(for_each_row(x), add_rms_norm_kernel, rows_of(x), rows_of(y), weight, eps, rows_of(h));
  }
  void add(MatrixView<float> x, MatrixView<const float> y) override {
    check_rows(y, x.rows, x.cols);
    launch(for_each_row(x), add_kernel, rows_of(x), rows_of(y));
  }
  void linear(MatrixView<const float> x, MatrixView<const float> w, MatrixView<float> y) override {
    cuda_gemm(x, Transpose::no, w, Transpose::no, y, false, stream_);
  }
  void add_bias(MatrixView<float> x, const float* bias) override {
    launch(for_each_row(x), add_bias_kernel, rows_of(x), bias);
  }
  void head_norm(MatrixView<float> x, int64_t head_dim, const float* weight, float eps) override {
    GYRE_CHECK(head_dim > 0 && x.cols % head_dim == 0, "{} columns in heads of {}", x.cols,
               head_dim);
    launch(for_each_row(x), head_norm_kernel, rows_of(x), head_dim, weight, eps);
  }
  void rope(MatrixView<float> q, MatrixView<float> k, int64_t head_dim,
            const Rotary& rotary) override {
    GYRE_CHECK(head_dim > 0 && q.cols % head_dim == 0 && k.cols % head_dim == 0,
               "{} and {} columns in heads of {}", q.cols, k.cols, head_dim);
    GYRE_CHECK(rotary.dim > 0 && rotary.dim % 2 == 0 && rotary.dim <= head_dim,
               "{} of {} elements turn", rotary.dim, head_dim);
    check_rows(q, slots_, q.cols);
    check_rows(k, slots_, k.cols);
    const int64_t half = rotary.dim / 2;
    prepare_turns(rotary);
    Launch shape = for_each_row(q);
    shape.shared_bytes = half * sizeof(Rotation);
    launch(shape, rope_kernel, positions_.data(), turns_.data(), static_cast<float>(rotary.scale),
           head_dim, half, rows_of(q), rows_of(k));
  }
  void silu_multiply(MatrixView<float> gate, MatrixView<const float> up) override {
    check_rows(up, gate.rows, gate.cols);
    launch(for_each_row(gate), silu_multiply_kernel, rows_of(gate), rows_of(up));
  }

 private:
  Launch for_each_row(const MatrixView<float>& x) const {
    GYRE_CHECK(x.rows <= 0x7fffffff, "{} rows", x.rows);
    return {static_cast<unsigned>(x.rows), threads, cuda_handle(stream_)};
  }
  static void check_rows(MatrixView<const float> x, int64_t rows, int64_t cols) {
    GYRE_CHECK(x.rows == rows && x.cols == cols, "[{}, {}], not [{}, {}]", x.rows, x.cols, rows,
               cols);
  }

  /// Work submitted earlier to the stream still reads the old contents and runs first.
  void upload(std::span<const int32_t> from, Buffer<int32_t>& to) {
    if (to.size() < std::ssize(from)) {
      stream_.synchronize();
      to = Buffer<int32_t>(std::ssize(from), MemorySpace::device);
    }
    stream_.copy(to.data(), from.data(), from.size_bytes());
  }

  /// Keeps the table of the previous call if the arguments are the same.
  void prepare_turns(const Rotary& rotary) {
    if (rotary == rotary_) return;
    stream_.synchronize();
    rotary_ = rotary;
    std::vector<double> turns;
    for (const double frequency : rotary.frequencies) turns.push_back(rope_turns(frequency));
    turns_ = Buffer<double>(std::ssize(turns), MemorySpace::device);
    stream_.copy(turns_.data(), turns.data(), turns.size() * sizeof(double));
    stream_.synchronize();
  }

  Stream& stream_;
  int64_t slots_ = 0;
  Buffer<int32_t> tokens_, positions_;  // [at least slots_]
  Rotary rotary_;
  Buffer<double> turns_;  // [rotary_.dim / 2]
};

}  // namespace

std::unique_ptr<DecoderOps> make_cuda_decoder_ops(Stream& stream) {
  return std::make_unique<CudaDecoderOps>(stream);
}

}  // namespace gyre
