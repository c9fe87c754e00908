// Tiled matrix product in shared memory, used where cuBLASLt is missing and to check it.
//
//     for every tile of c, 64 x 64:                     one block
//         for every 16 of k:
//             a_tile [16, 64], b_tile [16, 64] <- op(a)ᵀ, op(b), zeros outside
//             sums [4, 4] of each of 256 threads += a_tile[k, its rows] · b_tile[k, its columns]
//         c <- sums, or c + sums, rounded once
//
// An element of a tile is read once from device memory and 16 times from shared memory; each of
// these reads serves 4 products. Only cuBLASLt uses the tensor cores.

#include "runtime/cuda_gemm.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"
#include "runtime/gemm_layout.hpp"

namespace gyre {
namespace {

constexpr int tile = 64;   // rows and columns of c per block
constexpr int depth = 16;  // step along k
constexpr int each = 4;    // rows and columns per thread
constexpr int threads_across = tile / each;
constexpr int threads = threads_across * threads_across;

/// A factor with element (i, k) at i · line + k · along.
template <class T>
struct Factor {
  const T* data;
  int64_t line, along;
};

template <class T>
Factor<T> factor(ConstMatrixRef x, bool lines_are_rows) {
  const auto* data = reinterpret_cast<const T*>(x.data);
  return lines_are_rows ? Factor<T>{data, x.stride, 1} : Factor<T>{data, 1, x.stride};
}

/// to[k][i] <- the factor's elements (first + i, from + k); 0 for indices >= `lines` or `count`.
template <class T>
__device__ void load_tile(const Factor<T>& x, int64_t first, int64_t lines, int64_t from,
                          int64_t count, float (*to)[tile + 1]) {
  for (int e = static_cast<int>(threadIdx.x); e < tile * depth; e += threads) {
    // Neighbouring threads read neighbouring elements.
    const int i = x.along == 1 ? e / depth : e % tile;
    const int k = x.along == 1 ? e % depth : e / tile;
    const bool inside = first + i < lines && from + k < count;
    to[k][i] = inside ? to_float(x.data[(first + i) * x.line + (from + k) * x.along]) : 0.0F;
  }
}

__device__ void store(float* to, float value) {
  *to = value;
}
__device__ void store(bf16* to, float value) {
  *to = to_bf16(value);
}

template <class In, class Out>
__global__ void __launch_bounds__(threads)
    gemm_kernel(Factor<In> a, Factor<In> b, Out* c, int64_t c_stride, GemmShape shape,
                bool accumulate) {
  __shared__ float a_tile[depth][tile + 1], b_tile[depth][tile + 1];
  const int64_t row_tiles = (shape.m + tile - 1) / tile;
  const int64_t row = blockIdx.x % row_tiles * tile, column = blockIdx.x / row_tiles * tile;
  // Rows and columns of a thread are `threads_across` apart, so that reads have no bank conflicts
  // and writes are coalesced.
  const int y = static_cast<int>(threadIdx.x) / threads_across;
  const int x = static_cast<int>(threadIdx.x) % threads_across;
  float sums[each][each] = {};
  for (int64_t from = 0; from < shape.k; from += depth) {
    load_tile(a, row, shape.m, from, shape.k, a_tile);
    load_tile(b, column, shape.n, from, shape.k, b_tile);
    __syncthreads();
    for (int k = 0; k < depth; ++k) {
      float b_values[each];
      for (int j = 0; j < each; ++j) b_values[j] = b_tile[k][x + j * threads_across];
      for (int i = 0; i < each; ++i) {
        const float a_value = a_tile[k][y + i * threads_across];
        for (int j = 0; j < each; ++j) sums[i][j] += a_value * b_values[j];
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < each; ++i)
    for (int j = 0; j < each; ++j) {
      const int64_t r = row + y + i * threads_across, s = column + x + j * threads_across;
      if (r >= shape.m || s >= shape.n) continue;
      Out* to = c + r * c_stride + s;
      store(to, accumulate ? to_float(*to) + sums[i][j] : sums[i][j]);
    }
}

template <class In, class Out>
void multiply(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op, MatrixRef c,
              const GemmShape& shape, bool accumulate, Stream& stream) {
  const int64_t blocks = (shape.m + tile - 1) / tile * ((shape.n + tile - 1) / tile);
  GYRE_CHECK(blocks <= 0x7fffffff, "{} tiles of a product [{}, {}]", blocks, shape.m, shape.n);
  launch({static_cast<unsigned>(blocks), threads, cuda_handle(stream)}, gemm_kernel<In, Out>,
         factor<In>(a, a_op == Transpose::no), factor<In>(b, b_op == Transpose::yes),
         reinterpret_cast<Out*>(c.data), c.stride, shape, accumulate);
}

}  // namespace

void cuda_gemm_plain(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op,
                     MatrixRef c, bool accumulate, Stream& stream) {
  const GemmShape shape = gemm_shape(a, a_op, b, b_op, c);
  const auto run = a.type == DType::f32   ? multiply<float, float>
                   : c.type == DType::f32 ? multiply<bf16, float>
                                          : multiply<bf16, bf16>;
  run(a, a_op, b, b_op, c, shape, accumulate, stream);
}

#ifndef GYRE_WITH_CUBLAS
void cuda_gemm(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op, MatrixRef c,
               bool accumulate, Stream& stream) {
  cuda_gemm_plain(a, a_op, b, b_op, c, accumulate, stream);
}
#endif

}  // namespace gyre
