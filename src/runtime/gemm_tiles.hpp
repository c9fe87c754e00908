#pragma once
// Inner loops of f32 matrix products for AVX-512 processors with at least 48 KiB of L1 data cache.
// Others use libxsmm's kernels.

#include <cstdint>

namespace gyre {

/// A panel of this depth fits into the L1 cache.
inline constexpr int64_t tile_columns = 32, tile_depth = 384;

/// c [rows, columns] = a [rows, depth] · panel [depth, columns], or c +=. Each element is one chain
/// of FMAs in the order of depth, so its bits do not depend on the shape.
struct TileProduct {
  const float* a;
  int64_t a_stride;    ///< not a multiple of the size of a way of the L1 cache
  const float* panel;  ///< rows of tile_columns elements, 64-byte aligned
  float* c;
  int64_t c_stride;
  int64_t rows, columns, depth;  ///< columns <= tile_columns
  bool accumulate;
};

/// Whether this processor has multiply_tiles.
bool has_tiles();
void multiply_tiles(const TileProduct& product);

}  // namespace gyre
