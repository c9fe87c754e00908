#include <algorithm>
#include <cmath>

#include "core/index.hpp"
#include "logprobs/fused_linear/fused_linear_cuda.hpp"
#include "runtime/cuda_gemm.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"
#include "runtime/row_copy.hpp"

namespace gyre {
namespace {

constexpr int block_threads = 256;
/// Grid limit per dimension; grid-stride loops cover the rest.
constexpr int64_t max_blocks = 1024;

enum class Move { store, add };

/// Row to_rows[r] of `to` <- or += row from_rows[r] of `from`, for r < rows; null list: row r.
template <class From, class To>
struct RowMove {
  const From* from = nullptr;
  To* to = nullptr;
  int64_t rows = 0, cols = 0, from_stride = 0, to_stride = 0;
  const int32_t* from_rows = nullptr;
  const int32_t* to_rows = nullptr;
};

// Row moves take 1/D of the products' work, so element-wise access is fast enough.
template <class From, class To, Move how>
__global__ void move_rows(RowMove<From, To> m) {
  for (int64_t r = blockIdx.y; r < m.rows; r += gridDim.y) {
    const From* from = m.from + (m.from_rows == nullptr ? r : m.from_rows[r]) * m.from_stride;
    To* to = m.to + (m.to_rows == nullptr ? r : m.to_rows[r]) * m.to_stride;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < m.cols;
         i += int64_t{gridDim.x} * blockDim.x) {
      if constexpr (how == Move::add)
        to[i] += from[i];
      else if constexpr (sizeof(From) == sizeof(To))
        to[i] = from[i];
      else
        to[i] = to_float(from[i]);
    }
  }
}

__global__ void zero_rows(MatrixView<float> to) {
  for (int64_t r = blockIdx.y; r < to.rows; r += gridDim.y)
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < to.cols;
         i += int64_t{gridDim.x} * blockDim.x)
      to.data[r * to.stride + i] = 0;
}

__global__ void soft_cap_rows(MatrixView<float> z, float cap) {
  for (int64_t r = blockIdx.y; r < z.rows; r += gridDim.y)
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < z.cols;
         i += int64_t{gridDim.x} * blockDim.x) {
      float& value = z.data[r * z.stride + i];
      value = cap * std::tanh(value / cap);
    }
}

Launch shape_of(int64_t rows, int64_t cols, Stream& stream) {
  const int64_t wide = std::min(ceil_div(cols, block_threads), max_blocks);
  return {dim3(static_cast<unsigned>(wide), static_cast<unsigned>(std::min(rows, max_blocks))),
          block_threads, cuda_handle(stream)};
}

template <Move how = Move::store, class From, class To>
void move(const RowMove<From, To>& m, Stream& stream) {
  launch(shape_of(m.rows, m.cols, stream), move_rows<From, To, how>, m);
}

/// to <- listed rows of `from`, or its first rows without a list; bf16 is widened if `to` is f32.
void gather(ConstMatrixRef from, const int32_t* numbers, MatrixRef to, Stream& stream) {
  const auto start = [&](const auto* source, auto* target) {
    using From = std::remove_cvref_t<decltype(*source)>;
    using To = std::remove_reference_t<decltype(*target)>;
    move(RowMove<From, To>{source, target, to.rows, to.cols, from.stride, to.stride, numbers,
                           nullptr},
         stream);
  };
  if (from.type == DType::f32)
    start(from.as<float>().data, to.as<float>().data);
  else if (to.type == DType::bf16)
    start(from.as<bf16>().data, to.as<bf16>().data);
  else
    start(from.as<bf16>().data, to.as<float>().data);
}

/// Device memory for a matrix of either type.
class Scratch {
 public:
  Scratch() = default;
  Scratch(int64_t count, DType type)
      : type_(type), bytes_(count * size_of(type), MemorySpace::device) {}
  MatrixRef matrix(int64_t rows, int64_t cols) { return {bytes_.data(), type_, rows, cols, cols}; }

 private:
  DType type_ = DType::f32;
  Buffer<std::byte> bytes_;
};

/// Converts X and the weight to one type for all products: bf16 if both are bf16, else f32.
class DeviceTile final : public LinearTile {
 public:
  DeviceTile(TileSize most, int64_t hidden, DType x, DType weight, Stream& stream)
      : most_(most),
        hidden_(hidden),
        type_(x == weight ? x : DType::f32),
        stream_(stream),
        logits_(most.rows * most.columns, MemorySpace::device) {
    if (type_ == DType::bf16) gradient_ = Scratch(most.rows * most.columns, DType::bf16);
    if (weight != type_) weight_memory_ = Scratch(most.columns * hidden, type_);
  }

  void load(ConstMatrixRef x, int64_t first, int64_t rows) override {
    const int64_t row_bytes = x.stride * size_of(x.type);
    const ConstMatrixRef source{x.data + first * row_bytes, x.type, rows, x.cols, x.stride};
    x_ = source;
    if (x.type != type_) keep(source, nullptr, rows);
  }
  void load_listed(ConstMatrixRef x, const int32_t* numbers, int64_t rows) override {
    keep(x, numbers, rows);
  }
  MatrixView<float> logits(ConstMatrixRef weight) override {
    weight_ = weight;
    if (weight.type != type_) {
      const MatrixRef converted = weight_memory_.matrix(weight.rows, hidden_);
      gather(weight, nullptr, converted, stream_);
      weight_ = converted;
    }
    const MatrixView<float> z = logits_.matrix(x_.rows, weight.rows);
    cuda_gemm(x_, Transpose::no, weight_, Transpose::yes, z, false, stream_);
    return z;
  }
  MatrixRef gradient() override {
    if (type_ == DType::bf16) return gradient_.matrix(x_.rows, weight_.rows);
    return logits_.matrix(x_.rows, weight_.rows);
  }
  void add_d_x(MatrixView<float> d_x, bool accumulate) override {
    cuda_gemm(gradient(), Transpose::no, weight_, Transpose::no, d_x, accumulate, stream_);
  }
  void add_d_weight(MatrixView<float> d_weight) override {
    cuda_gemm(gradient(), Transpose::yes, x_, Transpose::no, d_weight, true, stream_);
  }

 private:
  void keep(ConstMatrixRef x, const int32_t* numbers, int64_t rows) {
    if (!has_rows_) rows_ = Scratch(most_.rows * hidden_, type_);
    has_rows_ = true;
    const MatrixRef kept = rows_.matrix(rows, hidden_);
    gather(x, numbers, kept, stream_);
    x_ = kept;
  }

  TileSize most_;
  int64_t hidden_;
  DType type_;
  Stream& stream_;
  Buffer<float> logits_;
  Scratch gradient_, weight_memory_, rows_;
  bool has_rows_ = false;
  ConstMatrixRef x_, weight_;
};

class CudaLinearOps final : public LinearOps {
 public:
  CudaLinearOps(Stream& stream, RowKernels& kernels) : stream_(stream), kernels_(kernels) {}

  MemorySpace space() const override { return MemorySpace::device; }
  RowKernels& row_kernels() override { return kernels_; }
  std::unique_ptr<LinearTile> make_tile(TileSize most, int64_t hidden, DType x, DType weight,
                                        int) override {
    return std::make_unique<DeviceTile>(most, hidden, x, weight, stream_);
  }

  Buffer<int32_t> upload(std::span<const int32_t> numbers) override {
    Buffer<int32_t> copied(std::ssize(numbers), MemorySpace::device);
    stream_.copy(copied.data(), numbers.data(), numbers.size_bytes());
    stream_.synchronize();
    return copied;
  }
  void copy(ConstMatrixRef from, MatrixRef to) override { copy_matrix(from, to, stream_); }
  void scatter(MatrixView<const float> from, const int32_t* numbers,
               MatrixView<float> to) override {
    move(RowMove<float, float>{from.data, to.data, from.rows, from.cols, from.stride, to.stride,
                               nullptr, numbers},
         stream_);
  }
  void add(MatrixView<const float> from, MatrixView<float> to) override {
    move<Move::add>(RowMove<float, float>{from.data, to.data, from.rows, from.cols, from.stride,
                                          to.stride, nullptr, nullptr},
                    stream_);
  }
  void fill_zero(MatrixView<float> to) override {
    launch(shape_of(to.rows, to.cols, stream_), zero_rows, to);
  }
  void soft_cap(MatrixView<float> z, float cap) override {
    launch(shape_of(z.rows, z.cols, stream_), soft_cap_rows, z, cap);
  }

 private:
  Stream& stream_;
  RowKernels& kernels_;
};

}  // namespace

std::unique_ptr<LinearOps> make_cuda_linear_ops(Stream& stream, RowKernels& kernels) {
  GYRE_CHECK(stream.space() == MemorySpace::device && kernels.space() == MemorySpace::device,
             "a stream of {} memory, kernels of {}", name_of(stream.space()),
             name_of(kernels.space()));
  return std::make_unique<CudaLinearOps>(stream, kernels);
}

}  // namespace gyre
