#include <algorithm>

#include "core/error.hpp"
#include "core/index.hpp"
#include "logprobs/cuda_block_copy.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"

namespace gyre {
namespace {

constexpr int block_threads = 256;
/// Pieces of a row that a thread copies before another one would.
constexpr int64_t pieces_of_thread = 4;
/// Of a grid, either way: enough to fill a device; the rest is their loops'.
constexpr int64_t most_blocks = 1024;

template <class Unit>
__device__ void copy_piece(const std::byte* from, std::byte* to) {
  *reinterpret_cast<Unit*>(to) = *reinterpret_cast<const Unit*>(from);
}
template <>
__device__ void copy_piece<uint4>(const std::byte* from, std::byte* to) {
  store_once(to, load_once(from));
}

/// Threads of x take pieces of a row, those of y rows.
template <class Unit>
__global__ void copy_rows(BlockCopy block) {
  constexpr int64_t unit = sizeof(Unit);
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t r = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; r < block.rows;
       r += int64_t{gridDim.y} * blockDim.y) {
    const std::byte* from = block.from + r * block.from_stride;
    std::byte* to = block.to + r * block.to_stride;
    for (int64_t at = first * unit; at < block.bytes; at += unit * gridDim.x * blockDim.x) {
      if (at + unit <= block.bytes)
        copy_piece<Unit>(from + at, to + at);
      else
        for (int64_t i = at; i < block.bytes; ++i) to[i] = from[i];
    }
  }
}

template <class Unit>
void start(const BlockCopy& block, Stream& stream) {
  const int64_t pieces = ceil_div(block.bytes, static_cast<int64_t>(sizeof(Unit)));
  int wide = block_threads;
  while (wide > 1 && wide / 2 >= pieces) wide /= 2;  // short rows share a block
  const int high = block_threads / wide;
  const int64_t columns = ceil_div(pieces, wide * pieces_of_thread);
  const dim3 grid(static_cast<unsigned>(std::min(columns, most_blocks)),
                  static_cast<unsigned>(std::min(ceil_div(block.rows, high), most_blocks)));
  launch(
      {grid, dim3(static_cast<unsigned>(wide), static_cast<unsigned>(high)), cuda_handle(stream)},
      copy_rows<Unit>, block);
}

}  // namespace

BlockCopy block_copy(ConstMatrixRef from, MatrixRef to) {
  GYRE_CHECK(from.rows == to.rows && from.cols == to.cols && from.type == to.type,
             "{} x {} of {} copied to {} x {} of {}", from.rows, from.cols, name_of(from.type),
             to.rows, to.cols, name_of(to.type));
  const auto element = static_cast<int64_t>(size_of(from.type));
  BlockCopy block{
      from.data,          to.data, from.rows, from.cols * element, from.stride * element,
      to.stride * element};
  if (block.from_stride == block.bytes && block.to_stride == block.bytes) {
    block.bytes *= block.rows;  // one long row
    block.rows = 1;
  }
  if (block.rows == 1) block.from_stride = block.to_stride = 0;
  return block;
}

void cuda_copy_block(const BlockCopy& block, Stream& stream) {
  if (block.rows == 0 || block.bytes == 0) return;
  switch (block.unit()) {
    case 16:
      return start<uint4>(block, stream);
    case 8:
      return start<uint2>(block, stream);
    case 4:
      return start<uint32_t>(block, stream);
    case 2:
      return start<uint16_t>(block, stream);
    default:
      return start<uint8_t>(block, stream);
  }
}

}  // namespace gyre
