#include <algorithm>

#include "core/error.hpp"
#include "core/index.hpp"
#include "logprobs/cuda_block_copy.hpp"
#include "logprobs/rows/cuda_row_lanes.cuh"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"

namespace gyre {
namespace {

using rows::block_threads;
/// Number of units that a thread loads before it stores the first.
constexpr int pieces_of_thread = 4;
/// Grid limit per dimension; grid-stride loops cover the rest.
constexpr int64_t max_blocks = 1024;

/// Grid dimension x covers the units of a row, dimension y the rows. A thread loads all its units
/// before it stores the first; bytes after the last whole unit are copied one by one.
template <class Unit>
__global__ void __launch_bounds__(block_threads) copy_rows(BlockCopy block) {
  constexpr int64_t unit = sizeof(Unit);
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x, pieces = block.bytes / unit;
  for (int64_t r = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; r < block.rows;
       r += int64_t{gridDim.y} * blockDim.y) {
    const std::byte* from = block.from + r * block.from_stride;
    std::byte* to = block.to + r * block.to_stride;
    const auto* units = reinterpret_cast<const Unit*>(from);
    for (int64_t at = first; at < pieces; at += pieces_of_thread * threads) {
      Unit held[pieces_of_thread];
      rows::unrolled<pieces_of_thread>([&](int k) {
        held[k] = at + k * threads < pieces ? __ldcs(units + at + k * threads) : Unit{};
      });
      rows::unrolled<pieces_of_thread>([&](int k) {
        if (at + k * threads < pieces)
          __stcs(reinterpret_cast<Unit*>(to) + at + k * threads, held[k]);
      });
    }
    for (int64_t i = pieces * unit + first; i < block.bytes; i += threads) to[i] = from[i];
  }
}

template <class Unit>
void start(const BlockCopy& block, Stream& stream) {
  const int64_t pieces = ceil_div(block.bytes, sizeof(Unit));
  int wide = block_threads;
  while (wide > 1 && wide / 2 >= pieces) wide /= 2;  // short rows share a block
  const int high = block_threads / wide;
  const int64_t columns = ceil_div(pieces, int64_t{wide} * pieces_of_thread);
  const dim3 grid(static_cast<unsigned>(std::min(columns, max_blocks)),
                  static_cast<unsigned>(std::min(ceil_div(block.rows, high), max_blocks)));
  launch(
      {grid, dim3(static_cast<unsigned>(wide), static_cast<unsigned>(high)), cuda_handle(stream)},
      copy_rows<Unit>, block);
}

}  // namespace

BlockCopy block_copy(ConstMatrixRef from, MatrixRef to) {
  GYRE_CHECK(from.rows == to.rows && from.cols == to.cols && from.type == to.type,
             "{} x {} of {} copied to {} x {} of {}", from.rows, from.cols, name_of(from.type),
             to.rows, to.cols, name_of(to.type));
  const int64_t element = size_of(from.type);
  BlockCopy block{
      from.data,          to.data, from.rows, from.cols * element, from.stride * element,
      to.stride * element};
  if (block.from_stride == block.bytes && block.to_stride == block.bytes) {
    block.bytes *= block.rows;  // contiguous on both sides: one long row
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

void cuda_copy(ConstMatrixRef from, MatrixRef to, Stream& stream) {
  cuda_copy_block(block_copy(from, to), stream);
}

}  // namespace gyre
