#pragma once
// Growing scratch memory on a device.

#include "core/matrix_ref.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

class Scratch {
 public:
  std::byte* at_least(int64_t bytes) {
    if (buffer_.size() < bytes) buffer_ = Buffer<std::byte>(bytes, MemorySpace::device);
    return buffer_.data();
  }
  MatrixRef matrix(DType type, int64_t rows, int64_t columns) {
    const int64_t bytes = rows * columns * size_of(type);
    return {at_least(bytes), type, rows, columns, columns};
  }

 private:
  Buffer<std::byte> buffer_;
};

}  // namespace gyre
