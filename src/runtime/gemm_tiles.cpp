// Register tiles of 12 x 32 elements: 24 accumulators, 2 vectors of the panel, and one broadcast
// element of a. A step of depth issues 14 loads for 24 FMAs. Tiles of 64 columns need 10, but their
// panel does not fit into the L1 cache.

#include "runtime/gemm_tiles.hpp"

#include <unistd.h>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/gemm_tiles.cpp"
// The order matters: foreach_target first.
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <array>
#include <utility>

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
#if HWY_TARGET <= HWY_AVX3
namespace hn = hwy::HWY_NAMESPACE;

constexpr int most_rows = 12, vector = 16;
constexpr int64_t ahead = 10 * tile_columns;  // the first tile reads the panel from the L2 cache

/// One register tile. Prefetches the elements of c from `next` on, which the next tile reads.
template <int vectors, int rows>
HWY_NOINLINE void multiply_tile(const TileProduct& x, const float* next) {
  const hn::FixedTag<float, vector> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t stride = x.c_stride;
  float* const c = x.c;
  V sums[rows][vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v)
      sums[i][v] = x.accumulate ? hn::LoadU(d, c + i * stride + v * vector) : hn::Zero(d);
  for (int i = 0; i < rows; ++i)
    for (int v = 0; v < vectors; ++v) hwy::Prefetch(next + i * stride + v * vector);
  const float *a = x.a, *b = x.panel;
  for (const float* const end = a + x.depth; a < end; ++a, b += tile_columns) {
    V from[vectors];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      from[v] = hn::Load(d, b + v * vector);
      hwy::Prefetch(b + ahead + v * vector);
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const V factor = hn::Set(d, a[i * x.a_stride]);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) sums[i][v] = hn::MulAdd(factor, from[v], sums[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) hn::StoreU(sums[i][v], d, c + i * stride + v * vector);
}

/// multiply_tiles for columns = 16 · vectors.
template <int vectors>
void multiply_rows(const TileProduct& x) {
  using Tile = void (*)(const TileProduct&, const float*);
  static constexpr auto tile_of = []<size_t... i>(std::index_sequence<i...>) {
    return std::array<Tile, most_rows>{multiply_tile<vectors, static_cast<int>(i) + 1>...};
  }
  (std::make_index_sequence<most_rows>());
  const int64_t tiles = (x.rows + most_rows - 1) / most_rows;
  TileProduct tile = x;
  for (int64_t t = 0, row = 0; t < tiles; ++t) {
    const int64_t end = x.rows * (t + 1) / tiles;
    tile.a = x.a + row * x.a_stride;
    tile.c = x.c + row * x.c_stride;
    tile_of[end - row - 1](tile, t + 1 < tiles ? x.c + end * x.c_stride : tile.c);
    row = end;
  }
}

void multiply_tiles(const TileProduct& x) {
  if (x.columns == tile_columns) return multiply_rows<2>(x);
  // Whole vectors are computed beside c; elements after the last column are dropped.
  HWY_ALIGN float edge[most_rows * tile_columns] = {};
  TileProduct part = x;
  part.c = edge, part.c_stride = tile_columns;
  for (int64_t row = 0; row < x.rows; row += most_rows) {
    part.rows = std::min<int64_t>(most_rows, x.rows - row);
    part.a = x.a + row * x.a_stride;
    float* const c = x.c + row * x.c_stride;
    if (x.accumulate)
      for (int64_t i = 0; i < part.rows; ++i)
        std::copy_n(c + i * x.c_stride, x.columns, edge + i * tile_columns);
    x.columns <= vector ? multiply_rows<1>(part) : multiply_rows<2>(part);
    for (int64_t i = 0; i < part.rows; ++i)
      std::copy_n(edge + i * tile_columns, x.columns, c + i * x.c_stride);
  }
}
bool wide() {
  return true;
}
#else
void multiply_tiles(const TileProduct& /*x*/) {}
bool wide() {
  return false;
}
#endif
}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
HWY_EXPORT(multiply_tiles);
HWY_EXPORT(wide);

bool has_tiles() {
  static const bool has =
      HWY_DYNAMIC_DISPATCH(wide)() && sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 * 1024;
  return has;
}
void multiply_tiles(const TileProduct& product) {
  HWY_DYNAMIC_DISPATCH(multiply_tiles)(product);
}
}  // namespace gyre
#endif  // HWY_ONCE
