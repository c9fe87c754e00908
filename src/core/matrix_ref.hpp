#pragma once
// Views of row-major matrices whose element type, f32 or bf16, is known only at run time.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/dtype.hpp"
#include "core/error.hpp"
#include "core/view.hpp"

namespace gyre {

/// Row-major [rows, cols] of `type`; consecutive rows are `stride` elements apart. Byte is
/// std::byte or const std::byte.
template <class Byte>
struct BasicMatrixRef {
  Byte* data = nullptr;
  DType type = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  template <class T>
  using Element = std::conditional_t<std::is_const_v<Byte>, const T, T>;

  BasicMatrixRef() = default;
  BasicMatrixRef(Byte* data_, DType type_, int64_t rows_, int64_t cols_, int64_t stride_)
      : data(data_), type(type_), rows(rows_), cols(cols_), stride(stride_) {}
  template <class T>
  BasicMatrixRef(MatrixView<T> view)
      : data(reinterpret_cast<Byte*>(view.data)),
        type(dtype_of<std::remove_const_t<T>>),
        rows(view.rows),
        cols(view.cols),
        stride(view.stride) {}
  /// A writable matrix converts to a read-only one. (nvcc warns if it is not a template.)
  template <class To>
  requires(std::is_same_v<To, const Byte> && !std::is_const_v<Byte>) operator BasicMatrixRef<To>()
      const {
    return {data, type, rows, cols, stride};
  }

  bool empty() const { return data == nullptr; }
  /// Returns the matrix as a view of T, which must be its element type.
  template <class T>
  MatrixView<Element<T>> as() const {
    GYRE_CHECK(type == dtype_of<T>, "a matrix of {} used as {}", name_of(type),
               name_of(dtype_of<T>));
    return {reinterpret_cast<Element<T>*>(data), rows, cols, stride};
  }
  /// Returns columns [begin, begin + count).
  BasicMatrixRef columns_from(int64_t begin, int64_t count) const {
    return {data + begin * size_of(type), type, rows, count, stride};
  }
  /// Returns rows [begin, begin + count).
  BasicMatrixRef rows_from(int64_t begin, int64_t count) const {
    return {data + begin * stride * size_of(type), type, count, cols, stride};
  }
  /// Returns the element as f32.
  float at(int64_t row, int64_t col) const {
    return type == DType::f32 ? as<float>()(row, col) : to_float(as<bf16>()(row, col));
  }
};

using MatrixRef = BasicMatrixRef<std::byte>;
using ConstMatrixRef = BasicMatrixRef<const std::byte>;

/// to <- from, of equal shape, in host memory: rounded to the type of `to` or widened.
void copy_converted(ConstMatrixRef from, MatrixRef to);

}  // namespace gyre
