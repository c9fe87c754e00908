#pragma once
// Matrices in a stream's memory, read and filled on the host.

#include "core/matrix_ref.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Host view of a matrix in the stream's space, after all work submitted so far: the matrix itself
/// on the host; on a device a copy, complete when constructed.
class HostCopy {
 public:
  HostCopy() = default;
  HostCopy(const ConstMatrixRef& from, Stream& stream);
  const ConstMatrixRef& matrix() const { return matrix_; }
  float at(int64_t row, int64_t col) const { return matrix_.at(row, col); }

 private:
  Buffer<std::byte> copy_;
  ConstMatrixRef matrix_;
};

/// Host buffer for filling a whole matrix (cols = stride) in the stream's space: the matrix itself
/// on the host; on a device a separate matrix whose elements must all be written before upload().
class HostFill {
 public:
  HostFill(const MatrixRef& to, Stream& stream);
  const MatrixRef& matrix() const { return matrix_; }
  /// Copies the buffer to the matrix and waits for completion.
  void upload();

 private:
  MatrixRef to_;
  Stream& stream_;
  Buffer<std::byte> staging_;
  MatrixRef matrix_;
};

}  // namespace gyre
