#pragma once
// Blocks of matrices in device memory, copied elsewhere: columns of some rows to a message, and
// back. Limit: bytes read and written over the memory's bandwidth.

#include <cstddef>
#include <cstdint>

#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// `rows` runs of `bytes`, so many bytes apart on either side.
struct BlockCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t rows = 0, bytes = 0;
  int64_t from_stride = 0, to_stride = 0;

  /// Bytes that one instruction may move: 16, 8, 4, 2 or 1, of which both sides are multiples in
  /// every row. The last piece of a row may be shorter.
  GYRE_HOST_DEVICE int64_t unit() const {
    const auto bits = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                      static_cast<uintptr_t>(from_stride) | static_cast<uintptr_t>(to_stride) | 16U;
    return static_cast<int64_t>(bits & (~bits + 1));
  }
};

/// The block that makes `to` equal to `from`. They must have the same shape and type.
BlockCopy block_copy(ConstMatrixRef from, MatrixRef to);

/// Asynchronous, on a CUDA stream. The two sides must not overlap. Nothing is read or written
/// between the runs.
void cuda_copy_block(const BlockCopy& block, Stream& stream);

/// to <- from, of one shape and type: that of block_copy. Throws a runtime error in a build without
/// CUDA.
void cuda_copy(ConstMatrixRef from, MatrixRef to, Stream& stream);

}  // namespace gyre
