// The warp-wide products that attention is made of, against plain loops.

#include <random>
#include <vector>

#include "attention/kernels/cuda_tile_code.cuh"
#include "core/tolerance.hpp"
#include "gpu_test.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace {

using AttentionKernelMma = test::GpuTest;

std::vector<float> normal_numbers(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = normal(random);
  return x;
}
std::vector<bf16> rounded(const std::vector<float>& x) {
  std::vector<bf16> narrow;
  for (const float value : x) narrow.push_back(to_bf16(value));
  return narrow;
}

__global__ void one_mma(const bf16* a, const bf16* b, const float* c, float* d) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  // Straight from the tables of the PTX ISA.
  const auto pair = [](bf16 low, bf16 high) {
    return static_cast<uint32_t>(low.bits) | static_cast<uint32_t>(high.bits) << 16;
  };
  FourPairs x;
  for (int i = 0; i < 4; ++i) {
    const bf16* from = a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
    x.pairs[i] = pair(from[0], from[1]);
  }
  uint32_t y[2];
  for (int i = 0; i < 2; ++i) {
    const bf16* from = b + (2 * t + 8 * i) * 8 + g;
    y[i] = pair(from[0], from[8]);
  }
  float sums[4];
  for (int e = 0; e < 4; ++e) sums[e] = c[(g + e / 2 * 8) * 8 + 2 * t + e % 2];
  mma_bf16(sums, x, y[0], y[1]);
  for (int e = 0; e < 4; ++e) d[(g + e / 2 * 8) * 8 + 2 * t + e % 2] = sums[e];
}

TEST_F(AttentionKernelMma, OneInstructionIsAProduct) {
  const std::vector<bf16> a = rounded(normal_numbers(16 * 16, 1)),
                          b = rounded(normal_numbers(16 * 8, 2));
  const std::vector<float> c = normal_numbers(16 * 8, 3);
  const Buffer<bf16> a_there = to_device<bf16>(a), b_there = to_device<bf16>(b);
  const Buffer<float> c_there = to_device<float>(c);
  Buffer<float> d(16 * 8, MemorySpace::device);
  launch({1, 32, handle()}, one_mma, a_there.data(), b_there.data(), c_there.data(), d.data());
  const std::vector<float> got = to_host(d);
  for (size_t row = 0; row < 16; ++row)
    for (size_t column = 0; column < 8; ++column) {
      auto want = static_cast<double>(c[row * 8 + column]);
      for (size_t k = 0; k < 16; ++k)
        want += static_cast<double>(to_float(a[row * 16 + k])) *
                static_cast<double>(to_float(b[k * 8 + column]));
      EXPECT_NEAR(got[row * 8 + column], want, 4 * tolerance_for(DType::f32, 16))
          << row << ", " << column;
    }
}

constexpr int dim = 64, inner = 32;

/// scores [16][inner] = outer · innerᵀ; result [16][dim] = scores · inner.
template <class T>
__global__ void two_products(const T* outer, const T* inner_rows, float* scores, float* result) {
  constexpr int stride = tile_stride(dtype_of<T>, dim);
  T* const outer_tile = reinterpret_cast<T*>(dynamic_shared());
  T* const inner_tile = outer_tile + 16 * stride;
  float* const weights = reinterpret_cast<float*>(inner_tile + inner * stride);
  const auto all = [](int) { return true; };
  const DeviceInput outer_input{outer, 16, dim, dim, true},
      inner_input{inner_rows, inner, dim, dim, true};
  load_tiles<dim, 16, 32>(all, TileSource<T>{outer_tile, outer_input, 0, 0});
  load_tiles<dim, inner, 32>(all, TileSource<T>{inner_tile, inner_input, 0, 0});
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  Sums<inner> x;
  set_zero<inner>(x);
  add_row_products<dim, inner>(outer_tile, inner_tile, x);
  const LanePlace place;
  for (int n = 0; n < inner / 8; ++n)
    for (int e = 0; e < 4; ++e) scores[place.row(e / 2) * inner + place.column(n, e)] = x[n][e];
  Sums<dim> y;
  set_zero<dim>(y);
  add_weighted_rows<dim, inner, dim>(x, inner_tile, y, weights);
  for (int n = 0; n < dim / 8; ++n)
    for (int e = 0; e < 4; ++e) result[place.row(e / 2) * dim + place.column(n, e)] = y[n][e];
}

template <class T>
void start_two_products(CUstream_st* stream, const Buffer<T>& outer, const Buffer<T>& inner_rows,
                        Buffer<float>& scores, Buffer<float>& result) {
  const auto bytes = (16 + inner) * tile_stride(dtype_of<T>, dim) * static_cast<int>(sizeof(T)) +
                     16 * weight_stride(inner) * static_cast<int>(sizeof(float));
  launch({1, 32, stream, static_cast<size_t>(bytes)}, two_products<T>, outer.data(),
         inner_rows.data(), scores.data(), result.data());
}

/// Both products of standard normal numbers against doubles; `weight` is what a score is as a
/// weight.
template <class T, class Weight>
void expect_products(const std::vector<T>& outer, const std::vector<T>& inner_rows,
                     const std::vector<float>& scores, const std::vector<float>& result,
                     Weight weight) {
  const auto wide = [](T x) { return static_cast<double>(to_float(x)); };
  for (size_t i = 0; i < 16; ++i) {
    for (size_t j = 0; j < inner; ++j) {
      double want = 0;
      for (size_t d = 0; d < dim; ++d)
        want += wide(outer[i * dim + d]) * wide(inner_rows[j * dim + d]);
      EXPECT_NEAR(scores[i * inner + j], want, std::sqrt(dim) * tolerance_for(DType::f32, dim));
    }
    for (size_t d = 0; d < dim; ++d) {
      double want = 0, squares = 0;
      for (size_t j = 0; j < inner; ++j) {
        const auto w = static_cast<double>(weight(scores[i * inner + j]));
        want += w * wide(inner_rows[j * dim + d]);
        squares += w * w;
      }
      EXPECT_NEAR(result[i * dim + d], want,
                  std::sqrt(squares) * tolerance_for(DType::f32, inner + 1));
    }
  }
}

TEST_F(AttentionKernelMma, TilesOfBf16) {
  const std::vector<bf16> outer = rounded(normal_numbers(16 * dim, 4)),
                          inner_rows = rounded(normal_numbers(inner * dim, 5));
  const Buffer<bf16> a = to_device<bf16>(outer), b = to_device<bf16>(inner_rows);
  Buffer<float> scores(16 * inner, MemorySpace::device), result(16 * dim, MemorySpace::device);
  start_two_products(handle(), a, b, scores, result);
  expect_products(outer, inner_rows, to_host(scores), to_host(result),
                  [](float x) { return to_float(to_bf16(x)); });
}

TEST_F(AttentionKernelMma, TilesOfF32) {
  const std::vector<float> outer = normal_numbers(16 * dim, 6),
                           inner_rows = normal_numbers(inner * dim, 7);
  const Buffer<float> a = to_device<float>(outer), b = to_device<float>(inner_rows);
  Buffer<float> scores(16 * inner, MemorySpace::device), result(16 * dim, MemorySpace::device);
  start_two_products(handle(), a, b, scores, result);
  expect_products(outer, inner_rows, to_host(scores), to_host(result), [](float x) { return x; });
}

__global__ void round_pairs(const float* x, uint32_t* pairs) {
  pairs[threadIdx.x] = pack_bf16(x[2 * threadIdx.x], x[2 * threadIdx.x + 1]);
}

TEST_F(AttentionKernelMma, PairsAreRoundedToNearestEven) {
  std::vector<float> x = normal_numbers(64, 8);
  x[0] = 1 + 0x1p-8F, x[1] = 1 + 0x3p-8F;  // halfway: down to 1, up to 1 + 2^-6
  x[2] = -std::numeric_limits<float>::infinity(), x[3] = 0;
  const Buffer<float> from = to_device<float>(x);
  Buffer<uint32_t> to(32, MemorySpace::device);
  launch({1, 32, handle()}, round_pairs, from.data(), to.data());
  const std::vector<uint32_t> got = to_host(to);
  EXPECT_EQ(got[0], 0x3f803f80U + 0x20000U);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(got[i] & 0xffffU, to_bf16(x[2 * i]).bits);
    EXPECT_EQ(got[i] >> 16, to_bf16(x[2 * i + 1]).bits);
  }
}

}  // namespace
}  // namespace gyre
