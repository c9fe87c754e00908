#pragma once
// The two products of the CUDA attention kernels. Lanes hold sums in the layout of mma's C
// (cuda_mma.cuh): rows g and g + 8 of 16 outer rows, columns 2t and 2t + 1 of every 8 columns.

#include "attention/kernels/cuda_arguments.hpp"
#include "attention/kernels/cuda_mma.cuh"
#include "attention/kernels/cuda_tiles.hpp"

namespace gyre {

/// Sums of 16 outer rows by `columns` columns.
template <int columns>
using Sums = float[columns / 8][4];

/// Calls f(n, e) for each of a lane's sums; for_row_sums: only for those of row `which`, 0 or 1.
template <int columns, class F>
__device__ __forceinline__ void for_sums(F f) {
  GYRE_UNROLL
  for (int i = 0; i < columns / 2; ++i) f(i / 4, i % 4);
}
template <int columns, class F>
__device__ __forceinline__ void for_row_sums(int which, F f) {
  GYRE_UNROLL
  for (int i = 0; i < columns / 4; ++i) f(i / 2, 2 * which + i % 2);
}
/// Calls f(0) and f(1), for the two rows of a lane.
template <class F>
__device__ __forceinline__ void for_rows(F f) {
  f(0);
  f(1);
}

template <int columns>
__device__ __forceinline__ void set_zero(Sums<columns>& sums) {
  for_sums<columns>([&](int n, int e) { sums[n][e] = 0; });
}

/// Position of the lane among the sums of its warp.
struct LanePlace {
  int warp, g, t;
  __device__ LanePlace()
      : warp(static_cast<int>(threadIdx.x) / warp_lanes),
        g(static_cast<int>(threadIdx.x) % warp_lanes / 4),
        t(static_cast<int>(threadIdx.x) % 4) {}
  /// Tile row of sums [e] and [e + 1] with e = 2 · which, `which` = 0 or 1.
  __device__ int row(int which) const { return 16 * warp + g + 8 * which; }
  /// Tile column of sums[n][e].
  __device__ int column(int n, int e) const { return 8 * n + 2 * t + e % 2; }
};

/// Sums of `groups` times 16 outer rows.
template <int columns, int groups>
using GroupSums = float[groups][columns / 8][4];
template <int columns, int groups>
__device__ __forceinline__ void set_zero(GroupSums<columns, groups>& sums) {
  GYRE_UNROLL
  for (int j = 0; j < groups; ++j) set_zero<columns>(sums[j]);
}
/// Calls f(j, i) for row i of the lane in group j.
template <int groups, class F>
__device__ __forceinline__ void for_group_rows(F f) {
  GYRE_UNROLL
  for (int j = 0; j < groups; ++j) for_rows([&](int i) { f(j, i); });
}
template <int n>
__device__ __forceinline__ float (&one_group(float (&sums)[n][4]))[1][n][4] {
  return reinterpret_cast<float(&)[1][n][4]>(sums);
}
template <int n>
__device__ __forceinline__ const float (&one_group(const float (&sums)[n][4]))[1][n][4] {
  return reinterpret_cast<const float(&)[1][n][4]>(sums);
}

/// sums [16 groups][inner] += `outer` [16 groups][dim] · `inner_tile` [inner][dim]ᵀ. All groups
/// share the loads of the inner tile.
template <int dim, int inner, int groups>
__device__ __forceinline__ void add_row_products(const bf16* outer, const bf16* inner_tile,
                                                 GroupSums<inner, groups>& sums) {
  constexpr int stride = tile_stride(DType::bf16, dim);
  GYRE_UNROLL
  for (int k = 0; k < dim; k += 16) {
    FourPairs a[groups];
    GYRE_UNROLL
    for (int j = 0; j < groups; ++j) a[j] = load_a(outer + 16 * j * stride + k, stride);
    GYRE_UNROLL
    for (int n = 0; n < inner / 16; ++n) {
      const FourPairs b = load_b_of_rows(inner_tile + 16 * n * stride + k, stride);
      GYRE_UNROLL
      for (int j = 0; j < groups; ++j) {
        mma_bf16(sums[j][2 * n], a[j], b.pairs[0], b.pairs[1]);
        mma_bf16(sums[j][2 * n + 1], a[j], b.pairs[2], b.pairs[3]);
      }
    }
  }
}

template <int dim, int inner, int groups>
__device__ __forceinline__ void add_row_products(const float* outer, const float* inner_tile,
                                                 GroupSums<inner, groups>& group_sums) {
  static_assert(groups == 1);
  Sums<inner>& sums = group_sums[0];
  constexpr int stride = tile_stride(DType::f32, dim);
  const LanePlace place;
  const auto dot = [](float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
  };
  const auto four = [](const float* x) { return *reinterpret_cast<const float4*>(x); };
  GYRE_NO_UNROLL
  for (int k = 0; k < dim; k += 4) {
    const float4 first = four(outer + place.g * stride + k);
    const float4 second = four(outer + (place.g + 8) * stride + k);
    for_row_sums<inner>(0, [&](int n, int e) {
      const float4 b = four(inner_tile + place.column(n, e) * stride + k);
      sums[n][e] = dot(first, b, sums[n][e]);
      sums[n][2 + e] = dot(second, b, sums[n][2 + e]);
    });
  }
}

/// add_row_products for 16 outer rows.
template <int dim, int inner, class T>
__device__ __forceinline__ void add_row_products(const T* outer, const T* inner_tile,
                                                 Sums<inner>& sums) {
  add_row_products<dim, inner>(outer, inner_tile, one_group(sums));
}

/// sums [16 groups][columns] += weights [16 groups][inner] · inner_tile [inner][columns], which
/// starts at the first of those columns in a tile of `dim`. bf16: weights are rounded. f32: weights
/// pass through `shared`, the warp's own [16][weight_stride(inner)].
template <int dim, int inner, int columns, int groups>
__device__ __forceinline__ void add_weighted_rows(const GroupSums<inner, groups>& weights,
                                                  const bf16* inner_tile,
                                                  GroupSums<columns, groups>& sums,
                                                  float* /*shared*/) {
  constexpr int stride = tile_stride(DType::bf16, dim);
  GYRE_UNROLL
  for (int k = 0; k < inner / 16; ++k) {
    FourPairs a[groups];
    GYRE_UNROLL
    for (int j = 0; j < groups; ++j) {
      const auto &low = weights[j][2 * k], &high = weights[j][2 * k + 1];
      a[j] = {{pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
               pack_bf16(high[2], high[3])}};
    }
    GYRE_UNROLL
    for (int n = 0; n < columns / 16; ++n) {
      const FourPairs b = load_b_of_columns(inner_tile + 16 * k * stride + 16 * n, stride);
      GYRE_UNROLL
      for (int j = 0; j < groups; ++j) {
        mma_bf16(sums[j][2 * n], a[j], b.pairs[0], b.pairs[1]);
        mma_bf16(sums[j][2 * n + 1], a[j], b.pairs[2], b.pairs[3]);
      }
    }
  }
}

template <int dim, int inner, int columns, int groups>
__device__ __forceinline__ void add_weighted_rows(const GroupSums<inner, groups>& group_weights,
                                                  const float* inner_tile,
                                                  GroupSums<columns, groups>& group_sums,
                                                  float* shared) {
  static_assert(groups == 1);
  const Sums<inner>& weights = group_weights[0];
  Sums<columns>& sums = group_sums[0];
  constexpr int stride = tile_stride(DType::f32, dim);
  const LanePlace place;
  __syncwarp();  // the previous product has read its weights
  for_sums<inner>([&](int n, int e) {
    shared[(place.g + e / 2 * 8) * weight_stride(inner) + place.column(n, e)] = weights[n][e];
  });
  __syncwarp();
  const float *first = shared + place.g * weight_stride(inner),
              *second = first + 8 * weight_stride(inner);
  GYRE_NO_UNROLL
  for (int i = 0; i < inner; ++i) {
    const float a = first[i], b = second[i];
    GYRE_UNROLL
    for (int n = 0; n < columns / 8; ++n) {
      const float2 x =
          *reinterpret_cast<const float2*>(inner_tile + i * stride + place.column(n, 0));
      sums[n][0] = fmaf(a, x.x, sums[n][0]);
      sums[n][1] = fmaf(a, x.y, sums[n][1]);
      sums[n][2] = fmaf(b, x.x, sums[n][2]);
      sums[n][3] = fmaf(b, x.y, sums[n][3]);
    }
  }
}

template <int dim, int inner, int columns, class T>
__device__ __forceinline__ void add_weighted_rows(const Sums<inner>& weights, const T* inner_tile,
                                                  Sums<columns>& sums, float* shared) {
  add_weighted_rows<dim, inner, columns>(one_group(weights), inner_tile, one_group(sums), shared);
}

}  // namespace gyre
