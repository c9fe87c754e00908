#pragma once
// Non-owning views of row-major arrays.

#include <cstdint>
#include <type_traits>

namespace gyre {

/// Row-major matrix [rows, cols]; consecutive rows are `stride` >= cols elements apart.
template <class T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  MatrixView() = default;
  MatrixView(T* data_, int64_t rows_, int64_t cols_) : MatrixView(data_, rows_, cols_, cols_) {}
  MatrixView(T* data_, int64_t rows_, int64_t cols_, int64_t stride_)
      : data(data_), rows(rows_), cols(cols_), stride(stride_) {}
  /// A writable view converts to a read-only one. (nvcc warns if it is not a template.)
  template <class To>
  requires(std::is_same_v<To, const T> && !std::is_const_v<T>) operator MatrixView<To>() const {
    return {data, rows, cols, stride};
  }

  T* row(int64_t r) const { return data + r * stride; }
  T& operator()(int64_t r, int64_t c) const { return data[r * stride + c]; }
  MatrixView rows_from(int64_t begin, int64_t count) const {
    return {row(begin), count, cols, stride};
  }
  MatrixView columns_from(int64_t begin, int64_t count) const {
    return {data + begin, rows, count, stride};
  }
};

}  // namespace gyre
