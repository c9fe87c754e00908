#pragma once
// Sizes of the tiles of the attention kernels on a GPU.
//
// A block is `warps` warps of 16 or 32 outer rows each; it holds its outer rows (forward: q; dQ: q,
// dO; dK and dV: k, v) and `stages` times `inner` rows of the two inner arrays in shared memory,
// one stage being filled while another is used. Rows are 16 bytes longer than `dim` elements, so
// that the 8 rows that a warp reads at once lie in different banks. For f32, where weights do not
// go from one product to the next in registers, there is a place for them, 16 rows for each warp.
//
// Wide tiles fit in the 99 KiB that a block may have on GPUs of compute capability 8.6, 8.9 and
// 12.0; on 8.0 (164 KiB an SM) and 9.0, 10.0 (228 KiB) two or more blocks share an SM where
// registers let them.
//
// In bf16 a warp of 16 rows loads 512 bytes of inner rows, which is what shared memory gives an SM
// in 4 cycles, for every two products of tensor cores; one of 32 rows loads half as much for each.
// So tiles are tall, with 32 rows a warp, where two such blocks fit; else narrow, with half as many
// inner rows, where only these leave room for a second block; else wide. KiB a block (blocks on
// 8.0, 9.0):
//
//     dimension     forward               dQ                     dK and dV
//                   wide       tall       wide       tall        wide       tall
//     64            45 (3, 4)  54 (2, 4)  54 (2, 4)  72 (2, 3)   54 (2, 4)  54 (2, 4)
//     96            65 (2, 3)  52 (3, 4)  52 (3, 4)  78 (2, 2)   52 (3, 4)
//     128           85 (1, 2)  68 (2, 3)  68 (2, 3)  102 (1, 2)  68 (2, 3)
//     256           99 (1, 2)  narrow: 66 (2, 3)
//
// Registers of a thread, of 255: for each 16 rows of its warp sums of dim/2 floats (dK and dV:
// dim/2 each, which is why dK and dV of dimension 256 are summed by two blocks, 128 columns each),
// and inner/2 floats for each of one (forward) or two products.

#include <array>
#include <cstdint>

#include "core/dtype.hpp"

namespace gyre {

enum class Sweep { forward, query_gradients, key_gradients };

struct TileShape {
  int dim = 0;  ///< head_dim, filled up with zeros
  int warps = 0;
  int inner = 0, stages = 0;
  int column_parts = 1;  ///< blocks that share the columns of the sums
  int groups = 1;        ///< of 16 outer rows, of a warp
  constexpr int outer() const { return 16 * groups * warps; }
  constexpr int threads() const { return 32 * warps; }
};

inline constexpr std::array tile_dims = {64, 96, 128, 256};

enum class TileForm { wide, narrow, tall };

/// Narrow and tall tiles are of sizes at which they help.
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
    // Where registers hold no more.
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

/// Elements from one row of a tile to the next in shared memory.
constexpr int tile_stride(DType type, int dim) {
  return dim + static_cast<int>(16 / size_of(type));
}
constexpr int weight_stride(int inner) {
  return inner + 4;
}
/// Elements of all tiles, before the weights.
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

/// Blocks that an SM with so many bytes of shared memory has room for; it keeps 1 KiB for each.
constexpr int64_t blocks_of_sm(DType type, Sweep sweep, const TileShape& shape, int64_t sm_bytes) {
  return sm_bytes / (shared_bytes(type, sweep, shape) + 1024);
}
/// Tall or narrow where there are such and two blocks fit, unless wide ones do as well as narrow.
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
