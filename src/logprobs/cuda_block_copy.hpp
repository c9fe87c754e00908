#pragma once
// Copies of matrix blocks in device memory, such as columns of some rows into a message and back.
// Memory bandwidth bounds the time: each byte is read and written once.

#include <cstddef>
#include <cstdint>

#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// `rows` runs of `bytes` bytes; strides are in bytes.
struct BlockCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t rows = 0, bytes = 0;
  int64_t from_stride = 0, to_stride = 0;

  /// Largest access in bytes, 16, 8, 4, 2 or 1, to which both sides are aligned in every row. The
  /// last access of a row may be shorter.
  GYRE_HOST_DEVICE int64_t unit() const {
    const auto bits = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                      static_cast<uintptr_t>(from_stride) | static_cast<uintptr_t>(to_stride) | 16U;
    return bits & (~bits + 1);
  }
};

/// Returns the block that copies `from` to `to`, which must have the same shape and type.
BlockCopy block_copy(ConstMatrixRef from, MatrixRef to);

/// Copies asynchronously on a CUDA stream. The two sides must not overlap. Bytes between the runs
/// are neither read nor written.
void cuda_copy_block(const BlockCopy& block, Stream& stream);

/// Copies `from` to `to` by block_copy. Throws a runtime error in a build without CUDA.
void cuda_copy(ConstMatrixRef from, MatrixRef to, Stream& stream);

}  // namespace gyre
