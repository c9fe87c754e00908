#pragma once
// Tile sizes of the CUDA attention kernels.
//
// A thread block has `warps` warps of 16 or 32 outer rows each (cuda_tiles.hpp). Shared memory
// holds its outer rows (forward: q; dQ: q, dO; dK and dV: k, v) and `stages` times `inner` rows of
// the two inner arrays; one stage is filled while another is used. Rows are padded by 16 bytes, so
// that the 8 rows that a warp reads at once lie in different banks. f32 weights do not pass from
// one product to the next in registers; shared memory has 16 rows for them per warp.
//
// Wide tiles fit in the 99 KiB per block of compute capability 8.6, 8.9 and 12.0. On 8.0 (164 KiB
// per SM), 9.0 and 10.0 (228 KiB) two or more blocks share an SM if registers permit.
//
// In bf16 a warp of 16 rows loads 512 bytes of inner rows per two tensor-core products, as much as
// shared memory delivers to an SM in 4 cycles; a warp of 32 rows loads half as much per product.
// Therefore tiles are tall (32 rows per warp) if two such blocks fit; else narrow (half the inner
// rows) if only these leave room for a second block; else wide. KiB per block (blocks per SM on
// 8.0, 9.0):
//
//     dimension     forward               dQ                     dK and dV
//                   wide       tall       wide       tall        wide       tall
//     64            45 (3, 4)  54 (2, 4)  54 (2, 4)  72 (2, 3)   54 (2, 4)  54 (2, 4)
//     96            65 (2, 3)  52 (3, 4)  52 (3, 4)  78 (2, 2)   52 (3, 4)
//     128           85 (1, 2)  68 (2, 3)  68 (2, 3)  102 (1, 2)  68 (2, 3)
//     256           99 (1, 2)  narrow: 66 (2, 3)
//
// Registers per thread, of 255, for each 16 rows of its warp: dim/2 floats for sums (dim/2 for each
// of dK and dV, so that two blocks of 128 columns share dimension 256), and inner/2 floats for each
// of one (forward) or two (backward) products.

#include <array>
#include <cstdint>

#include "core/dtype.hpp"

namespace gyre {

enum class Sweep { forward, query_gradients, key_gradients };

struct TileShape {
  int dim = 0;  ///< head_dim and value_dim, padded with zeros
  int warps = 0;
  int inner = 0, stages = 0;
  int column_parts = 1;  ///< number of blocks that share the columns of the sums
  int groups = 1;        ///< of 16 outer rows each, per warp
  constexpr int outer() const { return 16 * groups * warps; }
  constexpr int threads() const { return 32 * warps; }
};

inline constexpr std::array tile_dims = {64, 96, 128, 256};

enum class TileForm { wide, narrow, tall };

/// Narrow and tall forms exist only for sizes where they help.
constexpr bool has_form(DType type, Sweep sweep, int dim, TileForm form) {
  if (form == TileForm::wide) return true;
  if (type != DType::bf16) return false;
  if (form == TileForm::narrow) return sweep == Sweep::forward && dim == 256;
  return dim <= (sweep == Sweep::key_gradients ? 64 : 128);
}

/// `dim` is one of tile_dims.
constexpr TileShape tile_shape(DType type, Sweep sweep, int dim, TileForm form = TileForm::wide) {
  const bool forward = sweep == Sweep::forward;
  if (form != TileForm::wide && has_form(type, sweep, dim, form)) {
    TileShape shape = tile_shape(type, sweep, dim);
    if (form == TileForm::tall) shape.groups = 2;
    // Registers hold no more inner rows.
    if (form == TileForm::narrow || sweep == Sweep::key_gradients || (forward && dim > 64))
      shape.inner /= 2;
    return shape;
  }
  const int parts = sweep == Sweep::key_gradients && dim == 256 ? 2 : 1;
  if (type == DType::bf16) {
    if (dim == 256) return {dim, 4, forward ? 32 : 16, forward ? 2 : 1, parts};
    return {dim, 4, forward || dim == 64 ? 64 : 32, 2, parts};
  }
  if (dim == 64) return {dim, 4, 32, 2, parts};
  if (dim == 96) return {dim, 4, 32, forward ? 2 : 1, parts};
  if (dim == 128) return {dim, 4, forward ? 32 : 16, 1, parts};
  return {dim, 2, forward ? 16 : 8, 1, parts};
}

/// Elements between rows of a tile in shared memory.
constexpr int tile_stride(DType type, int dim) {
  return dim + static_cast<int>(16 / size_of(type));
}
constexpr int weight_stride(int inner) {
  return inner + 4;
}
/// Elements of all tiles in shared memory; the weights follow.
constexpr int tile_elements(DType type, Sweep sweep, const TileShape& shape) {
  const int outer_arrays = sweep == Sweep::forward ? 1 : 2;
  return (outer_arrays * shape.outer() + 2 * shape.stages * shape.inner) *
         tile_stride(type, shape.dim);
}
constexpr int shared_bytes(DType type, Sweep sweep, const TileShape& shape) {
  const int weights = type == DType::f32 ? shape.outer() * weight_stride(shape.inner) : 0;
  return tile_elements(type, sweep, shape) * static_cast<int>(size_of(type)) +
         weights * static_cast<int>(sizeof(float));
}

/// Blocks that fit in the shared memory of an SM, which reserves 1 KiB for each.
constexpr int64_t blocks_of_sm(DType type, Sweep sweep, const TileShape& shape, int64_t sm_bytes) {
  return sm_bytes / (shared_bytes(type, sweep, shape) + 1024);
}
/// Tall if two such blocks fit; else narrow if two of them but not two wide ones fit; else wide.
constexpr TileForm tile_form_for(DType type, Sweep sweep, int dim, int64_t sm_bytes) {
  const auto fit = [&](TileForm form) {
    return has_form(type, sweep, dim, form) &&
           blocks_of_sm(type, sweep, tile_shape(type, sweep, dim, form), sm_bytes) >= 2;
  };
  if (fit(TileForm::tall)) return TileForm::tall;
  return !fit(TileForm::wide) && fit(TileForm::narrow) ? TileForm::narrow : TileForm::wide;
}

/// The smallest of tile_dims that holds a head; 0 if there is none.
constexpr int tile_dim_for(int64_t head_dim) {
  for (const int dim : tile_dims)
    if (head_dim <= dim) return dim;
  return 0;
}

}  // namespace gyre
