// One block per row: a decoder has thousands of rows of a few thousand elements. Kernels are
// instantiated for f32 and bf16, and for accesses of 16 bytes (n = 8) or of one element (n = 1).

#include <type_traits>
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
template <class T>
struct Rows {
  T* data;
  int64_t stride, cols;
  __device__ T* mine() const { return data + blockIdx.x * stride; }
};
template <class T>
Rows<T> rows_of(MatrixRef x) {
  return {x.as<T>().data, x.stride, x.cols};
}
template <class T>
Rows<const T> rows_of(ConstMatrixRef x) {
  return {x.as<T>().data, x.stride, x.cols};
}

/// `n` consecutive elements, moved by accesses of 16 bytes if n > 1.
constexpr int wide = 8;
template <int n>
struct Values {
  float of[n];
};
template <int n>
__device__ Values<n> load(const float* from) {
  Values<n> x;
  if constexpr (n == 1)
    x.of[0] = *from;
  else
    GYRE_UNROLL for (int i = 0; i < n; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      x.of[i] = four.x, x.of[i + 1] = four.y, x.of[i + 2] = four.z, x.of[i + 3] = four.w;
    }
  return x;
}
template <int n>
__device__ Values<n> load(const bf16* from) {
  Values<n> x;
  if constexpr (n == 1) {
    x.of[0] = to_float(*from);
  } else {
    const uint4 eight = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[] = {eight.x, eight.y, eight.z, eight.w};
    GYRE_UNROLL for (int i = 0; i < 4; ++i) {
      x.of[2 * i] = to_float(bf16{static_cast<uint16_t>(pairs[i] & 0xffffU)});
      x.of[2 * i + 1] = to_float(bf16{static_cast<uint16_t>(pairs[i] >> 16)});
    }
  }
  return x;
}
template <int n>
__device__ void store(float* to, const Values<n>& x) {
  if constexpr (n == 1)
    *to = x.of[0];
  else
    GYRE_UNROLL for (int i = 0; i < n; i += 4) * reinterpret_cast<float4*>(to + i) =
        make_float4(x.of[i], x.of[i + 1], x.of[i + 2], x.of[i + 3]);
}
template <int n>
__device__ void store(bf16* to, const Values<n>& x) {
  if constexpr (n == 1)
    *to = to_bf16(x.of[0]);
  else
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pack_bf16(x.of[0], x.of[1]), pack_bf16(x.of[2], x.of[3]),
                   pack_bf16(x.of[4], x.of[5]), pack_bf16(x.of[6], x.of[7]));
}
/// The value that an array of T holds after `x` is stored.
template <class T>
__device__ float rounded(float x) {
  if constexpr (std::is_same_v<T, bf16>)
    return to_float(to_bf16(x));
  else
    return x;
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

/// First element of this thread in a row; the next is `threads` · n elements on.
template <int n>
__device__ int64_t first_element() {
  return static_cast<int64_t>(threadIdx.x) * n;
}

template <int n, class From, class To>
__global__ void __launch_bounds__(threads)
    embed_kernel(const int32_t* tokens, Rows<const From> table, int64_t table_rows, int64_t first,
                 Rows<To> out) {
  const int64_t row = tokens[blockIdx.x] - first;
  const bool here = row >= 0 && row < table_rows;
  for (int64_t c = first_element<n>(); c < out.cols; c += threads * n)
    store<n>(out.mine() + c, here ? load<n>(table.data + row * table.stride + c) : Values<n>{});
}

/// Rows of up to kept · threads · n elements are read once.
template <int n, class X, class H>
__global__ void __launch_bounds__(threads)
    add_rms_norm_kernel(Rows<X> x, Rows<const H> y, const float* weight, float eps, Rows<H> h) {
  constexpr int kept = 4;
  Values<n> values[kept];
  float squares = 0;
  const auto add = [&](int64_t c) {
    Values<n> sum = load<n>(x.mine() + c);
    if (y.data != nullptr) {
      const Values<n> more = load<n>(y.mine() + c);
      GYRE_UNROLL for (int i = 0; i < n; ++i) sum.of[i] = rounded<X>(sum.of[i] + more.of[i]);
      store<n>(x.mine() + c, sum);
    }
    GYRE_UNROLL for (int i = 0; i < n; ++i) squares += sum.of[i] * sum.of[i];
    return sum;
  };
  constexpr int64_t step = threads * n;
  GYRE_UNROLL for (int k = 0; k < kept; ++k) if (const int64_t c = first_element<n>() + k * step;
                                                 c < x.cols) values[k] = add(c);
  for (int64_t c = first_element<n>() + kept * step; c < x.cols; c += step) (void)add(c);
  const float scale = rms_scale(block_sum(squares), x.cols, eps);
  const auto norm = [&](int64_t c, Values<n> value) {
    const Values<n> factors = load<n>(weight + c);
    GYRE_UNROLL for (int i = 0; i < n; ++i) value.of[i] = value.of[i] * scale * factors.of[i];
    store<n>(h.mine() + c, value);
  };
  GYRE_UNROLL for (int k = 0; k < kept; ++k) if (const int64_t c = first_element<n>() + k * step;
                                                 c < x.cols) norm(c, values[k]);
  // No thread reads what another wrote, so no barrier is needed.
  for (int64_t c = first_element<n>() + kept * step; c < x.cols; c += step)
    norm(c, load<n>(x.mine() + c));
}

/// One warp for each head.
template <class T>
__global__ void __launch_bounds__(threads)
    head_norm_kernel(Rows<T> x, int64_t head_dim, const float* weight, float eps) {
  const int64_t lane = threadIdx.x % warp_lanes;
  for (int64_t head = threadIdx.x / warp_lanes; head < x.cols / head_dim;
       head += threads / warp_lanes) {
    T* mine = x.mine() + head * head_dim;
    float squares = 0;
    for (int64_t c = lane; c < head_dim; c += warp_lanes) {
      const float value = to_float(mine[c]);
      squares += value * value;
    }
    const float scale = rms_scale(warp_sum(squares), head_dim, eps);
    for (int64_t c = lane; c < head_dim; c += warp_lanes)
      store<1>(mine + c, {to_float(mine[c]) * scale * weight[c]});
  }
}

template <GateActivation activation, int n, class T>
__global__ void __launch_bounds__(threads) gate_multiply_kernel(Rows<T> gate, Rows<const T> up) {
  for (int64_t c = first_element<n>(); c < gate.cols; c += threads * n) {
    Values<n> product = load<n>(gate.mine() + c);
    const Values<n> factor = load<n>(up.mine() + c);
    GYRE_UNROLL for (int i = 0; i < n; ++i) product.of[i] =
        activated<activation>(product.of[i]) * factor.of[i];
    store<n>(gate.mine() + c, product);
  }
}

/// Rotates the pairs (i, i + half) of all heads of one row.
template <int n, class T>
__device__ void rotate(T* row, int64_t cols, int64_t head_dim, int64_t half,
                       const Rotation* rotations) {
  const int64_t parts = half / n;  // of a head
  for (int64_t e = threadIdx.x; e < cols / head_dim * parts; e += threads) {
    const int64_t pair = e % parts * n;
    T* low = row + e / parts * head_dim + pair;
    Values<n> a = load<n>(low), b = load<n>(low + half);
    GYRE_UNROLL for (int i = 0; i < n; ++i) {
      const Rotation turn = rotations[pair + i];
      const float first = turn.low(a.of[i], b.of[i]);
      b.of[i] = turn.high(a.of[i], b.of[i]);
      a.of[i] = first;
    }
    store<n>(low, a);
    store<n>(low + half, b);
  }
}

/// turns [half]; dynamic shared memory: half rotations.
template <int n, class T>
__global__ void __launch_bounds__(threads)
    rope_kernel(const int32_t* positions, const double* turns, float scale, int64_t head_dim,
                int64_t half, Rows<T> q, Rows<T> k) {
  auto* rotations = reinterpret_cast<Rotation*>(dynamic_shared());
  for (int64_t i = threadIdx.x; i < half; i += threads)
    rotations[i] = rope_rotation(positions[blockIdx.x], turns[i], scale);
  __syncthreads();
  rotate<n>(q.mine(), q.cols, head_dim, half, rotations);
  rotate<n>(k.mine(), k.cols, head_dim, half, rotations);
}

/// Whether every group of `wide` elements of a row is aligned for load and store.
template <class Matrix>
bool is_wide(const Matrix& x) {
  constexpr int64_t access = 16;
  return x.cols % wide == 0 && x.stride * size_of(x.type) % access == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % access == 0;
}
bool is_wide(const float* vector) {
  return reinterpret_cast<uintptr_t>(vector) % 16 == 0;
}
/// Calls f(n), a constant: `wide`, or 1.
template <class F>
void by_width(bool is_wide, F f) {
  if (is_wide)
    f(std::integral_constant<int, wide>());
  else
    f(std::integral_constant<int, 1>());
}
/// Calls f(T()) with the element type.
template <class F>
void by_type(DType type, F f) {
  if (type == DType::bf16)
    f(bf16());
  else
    f(float());
}

/// Calls f(activation), a constant.
template <class F>
void by_activation(GateActivation activation, F f) {
  switch (activation) {
    case GateActivation::silu:
      return f(std::integral_constant<GateActivation, GateActivation::silu>());
    case GateActivation::gelu:
      return f(std::integral_constant<GateActivation, GateActivation::gelu>());
    case GateActivation::gelu_tanh:
      return f(std::integral_constant<GateActivation, GateActivation::gelu_tanh>());
    case GateActivation::sigmoid:
      return f(std::integral_constant<GateActivation, GateActivation::sigmoid>());
  }
}

class CudaDecoderOps final : public DecoderOps {
 public:
  using DecoderOps::DecoderOps;

  void set_slots(std::span<const int32_t> tokens, std::span<const int32_t> positions) override {
    upload(tokens, tokens_);
    upload(positions, positions_);
    slots_ = std::ssize(tokens);
  }

  void embed(ConstMatrixRef table, int64_t first, MatrixRef out) override {
    check_rows(out, slots_, table.cols);
    by_width(is_wide(table) && is_wide(out), [&](auto n) {
      by_type(table.type, [&]<class From>(From) {
        by_type(out.type, [&]<class To>(To) {
          launch(for_each_row(out), embed_kernel<n(), From, To>, tokens_.data(),
                 rows_of<From>(table), table.rows, first, rows_of<To>(out));
        });
      });
    });
  }
  void add_rms_norm(MatrixRef x, ConstMatrixRef y, const float* weight, float eps,
                    MatrixRef h) override {
    if (!y.empty()) check_rows(y, x.rows, x.cols);
    check_rows(h, x.rows, x.cols);
    const bool aligned = is_wide(x) && is_wide(h) && is_wide(weight) && (y.empty() || is_wide(y));
    by_width(aligned, [&](auto n) {
      by_type(x.type, [&]<class X>(X) {
        by_type(h.type, [&]<class H>(H) {
          launch(for_each_row(x), add_rms_norm_kernel<n(), X, H>, rows_of<X>(x),
                 y.empty() ? Rows<const H>{} : rows_of<H>(y), weight, eps, rows_of<H>(h));
        });
      });
    });
  }
  void linear(ConstMatrixRef x, ConstMatrixRef w, MatrixRef y) override {
    cuda_gemm(x, Transpose::no, w, Transpose::no, y, false, stream_);
  }
  void head_norm(MatrixRef x, int64_t head_dim, const float* weight, float eps) override {
    GYRE_CHECK(head_dim > 0 && x.cols % head_dim == 0, "{} columns in heads of {}", x.cols,
               head_dim);
    by_type(x.type, [&]<class T>(T) {
      launch(for_each_row(x), head_norm_kernel<T>, rows_of<T>(x), head_dim, weight, eps);
    });
  }
  void rope(MatrixRef q, MatrixRef k, int64_t head_dim, const Rotary& rotary) override {
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
    const bool aligned = is_wide(q) && is_wide(k) && head_dim % wide == 0 && half % wide == 0;
    by_width(aligned, [&](auto n) {
      by_type(q.type, [&]<class T>(T) {
        launch(shape, rope_kernel<n(), T>, positions_.data(), turns_.data(),
               static_cast<float>(rotary.scale), head_dim, half, rows_of<T>(q), rows_of<T>(k));
      });
    });
  }
  void gate_multiply(MatrixRef gate, ConstMatrixRef up, GateActivation activation) override {
    check_rows(up, gate.rows, gate.cols);
    by_activation(activation, [&](auto f) {
      by_width(is_wide(gate) && is_wide(up), [&](auto n) {
        by_type(gate.type, [&]<class T>(T) {
          launch(for_each_row(gate), gate_multiply_kernel<f(), n(), T>, rows_of<T>(gate),
                 rows_of<T>(up));
        });
      });
    });
  }

 private:
  Launch for_each_row(const MatrixRef& x) const {
    GYRE_CHECK(x.rows <= 0x7fffffff, "{} rows", x.rows);
    return {static_cast<unsigned>(x.rows), threads, cuda_handle(stream_)};
  }
  static void check_rows(ConstMatrixRef x, int64_t rows, int64_t cols) {
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
