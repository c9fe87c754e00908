#pragma once
// Products of small matrices by one warp, on tensor cores for bf16.
//
// mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"): with
// g = lane / 4 and t = lane % 4, a lane holds
//
//     A [16 x 16], 4 registers of two    rows g, g + 8, g, g + 8; columns 2t, 2t + 1, the last two
//                                        registers 8 columns further
//     B [16 x 8],  2 registers of two    rows 2t, 2t + 1, and 8 rows further; column g
//     C [16 x 8],  4 floats              rows g, g, g + 8, g + 8; columns 2t, 2t + 1, 2t, 2t + 1
//
// C of one product, rounded, is therefore A of the next: columns 0-7 and 8-15 of A are two adjacent
// Cs. ldmatrix loads such registers from shared memory in blocks of 8 x 8 elements; each lane gives
// the address of one 16-byte row. The transposed form exchanges rows and columns.
//
// Both require only compute capability 8.0. On 9.0 and 10.0 wider instructions (wgmma, tcgen05)
// have a higher peak; the share of it that these reach has not been measured.

#include "runtime/device_code.cuh"

namespace gyre {

/// Four registers of two bf16 each, lower half first.
struct FourPairs {
  uint32_t pairs[4];
};

/// c += A · B.
__device__ inline void mma_bf16(float (&c)[4], const FourPairs& a, uint32_t b_low,
                                uint32_t b_high) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.pairs[0]), "r"(a.pairs[1]), "r"(a.pairs[2]), "r"(a.pairs[3]), "r"(b_low),
        "r"(b_high));
#elif defined(GYRE_SOFTGPU)
  struct Mine {
    uint32_t a[4], b[2];
  };
  const Mine mine{{a.pairs[0], a.pairs[1], a.pairs[2], a.pairs[3]}, {b_low, b_high}};
  const softgpu::Exchange all = softgpu::warp_exchange(&mine, sizeof(mine), "mma");
  const auto half = [](uint32_t pair, int k) {
    return to_float(bf16{static_cast<uint16_t>(pair >> (k % 2 * 16))});
  };
  const int g = softgpu::lane() / 4, t = softgpu::lane() % 4;
  for (int k = 0; k < 16; ++k) {
    const int holder = k % 8 / 2, far = k / 8;
    const Mine rows = all.get<Mine>(g * 4 + holder);
    for (int column = 0; column < 2; ++column) {
      const float b = half(all.get<Mine>((2 * t + column) * 4 + holder).b[far], k);
      c[column] += half(rows.a[2 * far], k) * b;
      c[2 + column] += half(rows.a[2 * far + 1], k) * b;
    }
  }
#endif
}

/// Loads four 8 x 8 matrices from shared memory; `row`: address of row lane % 8 of matrix lane / 8.
/// The lane gets elements (g, 2t) and (g, 2t + 1) of each; transposed: (2t, g) and (2t + 1, g).
template <bool transposed>
__device__ FourPairs load_matrices(const bf16* row) {
  FourPairs x;
#ifdef __CUDA_ARCH__
  const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.pairs[0]), "=r"(x.pairs[1]), "=r"(x.pairs[2]), "=r"(x.pairs[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.pairs[0]), "=r"(x.pairs[1]), "=r"(x.pairs[2]), "=r"(x.pairs[3])
                 : "r"(from)
                 : "memory");
#elif defined(GYRE_SOFTGPU)
  const softgpu::Exchange all = softgpu::warp_exchange(&row, sizeof(row), "ldmatrix");
  const int g = softgpu::lane() / 4, t = softgpu::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int r, int c) -> uint32_t {
      return all.get<const bf16*>(8 * i + r)[c].bits;
    };
    x.pairs[i] =
        transposed ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
  }
#endif
  return x;
}

/// A from rows [0, 16) and columns [0, 16) of a tile.
__device__ inline FourPairs load_a(const bf16* tile, int stride) {
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  return load_matrices<false>(tile + lane % 16 * stride + lane / 16 * 8);
}
/// Two Bs, in the first and last two registers; rows of the [16, 16] tile are columns of B.
__device__ inline FourPairs load_b_of_rows(const bf16* tile, int stride) {
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  return load_matrices<false>(tile + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
}
/// Two Bs; rows of the [16, 16] tile are rows of B.
__device__ inline FourPairs load_b_of_columns(const bf16* tile, int stride) {
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  return load_matrices<true>(tile + lane % 16 * stride + lane / 16 * 8);
}

}  // namespace gyre
