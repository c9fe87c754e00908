#pragma once
// Arguments of the CUDA attention kernels, and the functions that launch them.

#include <cstdint>

#include "attention/kernels/cuda_shapes.hpp"
#include "core/dtype.hpp"

struct CUstream_st;

namespace gyre {

struct TileRectangle;
struct TileRange;
struct OuterTile;

/// A TileTable in device memory.
struct DeviceTiles {
  const TileRectangle* rectangles = nullptr;
  const TileRange* ranges = nullptr;
  const OuterTile* tiles = nullptr;
  int count = 0;  ///< number of tiles
};

/// Whether every row of every head starts at, and has a length of, a multiple of 16 bytes, so that
/// it can be copied 16 bytes at a time.
constexpr bool in_pieces_of_16(uint64_t address, int64_t stride_bytes, int64_t head_bytes) {
  return address % 16 == 0 && stride_bytes % 16 == 0 && head_bytes % 16 == 0;
}

/// An input [rows, heads · dim] in device memory, of the kernel's element type.
struct DeviceInput {
  const void* data = nullptr;
  int64_t rows = 0, stride = 0;
  int dim = 0;           ///< elements of a head
  bool aligned = false;  ///< in_pieces_of_16()
};

/// An output [rows, heads · dim] in device memory; f32, or bf16 if `narrow`.
struct DeviceOutput {
  void* data = nullptr;
  int64_t rows = 0, stride = 0;
  bool narrow = false;
};

/// [rows, heads] of f32.
struct DeviceStatistic {
  float* data = nullptr;
  int64_t stride = 0;
};

struct KernelHeads {
  int heads = 0, kv_heads = 0, group = 1, skew = 0;
  int head_dim = 0, value_dim = 0;
  float scale = 0;
  int widest_dim() const { return head_dim < value_dim ? value_dim : head_dim; }
};

struct ForwardArguments {
  DeviceTiles tiles;  ///< tiles of queries
  KernelHeads heads;
  bool store_each_range = false;  ///< store results after every range: see BlockInput::fixed_tiles
  DeviceInput q, k, v;
  DeviceOutput out;
  DeviceStatistic lse;
};

struct BackwardArguments {
  DeviceTiles tiles;  ///< tiles of queries or of keys
  KernelHeads heads;
  bool store_each_range = false;
  DeviceInput q, k, v, d_out;
  DeviceStatistic lse, delta;  ///< read only
  DeviceOutput d_q;            ///< query gradients
  DeviceOutput d_k, d_v;       ///< key gradients; f32
};

/// Launches the kernel for arrays of `type` (f32 or bf16) and tile_dim_for(widest_dim);
/// asynchronous.
void start_forward(const ForwardArguments& arguments, DType type, TileForm form,
                   CUstream_st* stream);
void start_query_gradients(const BackwardArguments& arguments, DType type, TileForm form,
                           CUstream_st* stream);
void start_key_gradients(const BackwardArguments& arguments, DType type, TileForm form,
                         CUstream_st* stream);

}  // namespace gyre
