#pragma once
// Inner loops of f32 matrix products for AVX-512 processors with at least 48 KiB of L1 data cache.
// Others use libxsmm's kernels.

#include <cstdint>

namespace gyre {

inline constexpr int64_t tile_columns = 64, tile_depth = 384;
/// Distance between packed rows of a; the padding spreads them over the sets of the L1 cache.
inline constexpr int64_t tile_a_stride = tile_depth + 16;

/// c [rows, columns] = a [rows, depth] · panel [depth, columns], or c +=. Each element is one chain
/// of FMAs in the order of depth, so its bits do not depend on the shape.
struct TileProduct {
  const float* a;      ///< rows are tile_a_stride apart
  const float* panel;  ///< rows of tile_columns elements, 64-byte aligned
  float* c;
  int64_t c_stride;
  int64_t rows, columns, depth;  ///< columns <= tile_columns, depth <= tile_depth
  bool accumulate;
};

/// Whether this processor has multiply_tiles.
bool has_tiles();
void multiply_tiles(const TileProduct& product);

}  // namespace gyre
