#pragma once
// Matrices in host or device memory with a row for each token, of logits for example, and how they
// are filled and read row by row.

#include <cstdint>
#include <functional>
#include <span>

#include "core/matrix_ref.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// A matrix of logits on one rank, in host or device memory.
class LogitMatrix {
 public:
  LogitMatrix() = default;
  LogitMatrix(int64_t rows, int64_t cols, DType type, MemorySpace space = MemorySpace::host)
      : bytes_(rows * cols * size_of(type), space), ref_(bytes_.data(), type, rows, cols, cols) {}
  MatrixRef ref() { return ref_; }
  ConstMatrixRef ref() const { return ref_; }
  std::span<std::byte> bytes() { return bytes_.span(); }
  /// Fills the matrix with NaN, in the order of `stream`.
  void poison(Stream& stream) { stream.fill(bytes_.data(), std::byte{0xff}, bytes().size()); }

 private:
  Buffer<std::byte> bytes_;
  MatrixRef ref_;
};

/// Fills row r with the values that make_row(r, to [cols]) writes, rounded to the matrix's type.
/// Synchronizes `stream` if the matrix is on a device, so it is complete on return.
void fill_rows(MatrixRef matrix, Stream& stream,
               const std::function<void(int64_t row, std::span<float> to)>& make_row);

/// Like fill_rows, with the values of make_row(tokens[r], to) in row r. A negative token marks a
/// padding row, which becomes NaN.
void fill_rows_of_tokens(std::span<const int64_t> tokens, MatrixRef to, Stream& stream,
                         const std::function<void(int64_t token, std::span<float> to)>& make_row);

/// Reads matrix rows one at a time, to check them on the host.
class HostRow {
 public:
  /// Returns row `row` as a one-row matrix, valid until the next call. In host memory it is a view;
  /// on a device it is a copy, and the call synchronizes `stream`.
  ConstMatrixRef read(ConstMatrixRef matrix, int64_t row, Stream& stream);

 private:
  Buffer<std::byte> copy_;
};

}  // namespace gyre
