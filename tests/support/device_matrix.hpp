#pragma once
// Matrices in the memory of a stream: rows begin anywhere, and nobody may write between them.

#include <gtest/gtest.h>

#include <vector>

#include "core/matrix_ref.hpp"
#include "logprob_cases.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre::test {

class DeviceMatrix {
 public:
  /// A copy of `from`, whose first element lies `lead` elements behind an aligned address.
  DeviceMatrix(ConstMatrixRef from, Stream& stream, int64_t lead = 0, int64_t gap = 3)
      : stream_(stream),
        type_(from.type),
        rows_(from.rows),
        cols_(from.cols),
        stride_(from.cols + gap),
        lead_(lead),
        bytes_(static_cast<size_t>(lead + rows_ * stride_ + tail) * size_of(type_), guard),
        memory_(std::ssize(bytes_), stream.space()) {
    for (int64_t r = 0; r < rows_; ++r)
      std::copy_n(from.data + r * from.stride * element(), cols_ * element(),
                  bytes_.begin() + (lead_ + r * stride_) * element());
    stream_.copy(memory_.data(), bytes_.data(), bytes_.size());
    stream_.synchronize();
  }
  /// Filled with NaN.
  DeviceMatrix(int64_t rows, int64_t cols, DType type, Stream& stream, int64_t lead = 0,
               int64_t gap = 3)
      : DeviceMatrix(std::as_const(*std::make_unique<Matrix>(rows, cols, type)).ref(), stream, lead,
                     gap) {}

  MatrixRef ref() { return {memory_.data() + lead_ * element(), type_, rows_, cols_, stride_}; }
  ConstMatrixRef ref() const { return const_cast<DeviceMatrix*>(this)->ref(); }

  /// The elements now. Expects that nothing else has been written.
  Matrix host() {
    std::vector<std::byte> now(bytes_.size());
    stream_.copy(now.data(), memory_.data(), now.size());
    stream_.synchronize();
    Matrix matrix(rows_, cols_, type_);
    const MatrixRef to = matrix.ref();
    for (int64_t r = 0; r < rows_; ++r) {
      const auto row = now.begin() + (lead_ + r * stride_) * element();
      std::copy_n(row, cols_ * element(), to.data + r * to.stride * element());
      std::fill_n(row, cols_ * element(), guard);
    }
    EXPECT_EQ(std::count(now.begin(), now.end(), guard), std::ssize(now))
        << "written outside of the rows";
    return matrix;
  }

 private:
  static constexpr std::byte guard{0xff};  // NaN in f32 and bf16
  static constexpr int64_t tail = 9;
  int64_t element() const { return size_of(type_); }

  Stream& stream_;
  DType type_;
  int64_t rows_, cols_, stride_, lead_;
  std::vector<std::byte> bytes_;
  Buffer<std::byte> memory_;
};

}  // namespace gyre::test
