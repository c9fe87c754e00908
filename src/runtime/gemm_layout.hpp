#pragma once
// Conversion of a row-major matrix product for a column-major library.
//
// A row-major matrix is the transpose of the column-major one at the same address, with the same
// distance between its lines. So c = op(a) · op(b) is computed as cᵀ = op(b)ᵀ · op(a)ᵀ, and nothing
// is transposed in memory. Example, c [2, 5] = a [2, 3] · bᵀ with b [5, 3]:
//
//     row-major                     column-major
//     c [2, 5], stride 5            cᵀ [5, 2], leading dimension 5
//     b [5, 3], stride 3            first factor: [3, 5], leading dimension 3, transposed
//     a [2, 3], stride 3            second factor: [3, 2], leading dimension 3, not transposed

#include "runtime/cuda_gemm.hpp"

namespace gyre {

struct GemmShape {
  int64_t m = 0, n = 0, k = 0;  ///< c [m, n] = op(a) [m, k] · op(b) [k, n]
};
/// Shape of a product. Throws a usage error that names all shapes and types if they do not fit.
GemmShape gemm_shape(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op,
                     ConstMatrixRef c);

/// result [m, n] = op(first) [m, k] · op(second) [k, n], column-major; m and n are swapped against
/// the row-major product.
struct ColumnMajorGemm {
  struct Matrix {
    const std::byte* data = nullptr;
    DType type = DType::f32;
    int64_t rows = 0, cols = 0;  ///< as laid out in memory
    int64_t leading = 0;         ///< elements from one column to the next, >= rows
    Transpose op = Transpose::no;
  };
  int64_t m = 0, n = 0, k = 0;
  Matrix first, second, result;
};
ColumnMajorGemm column_major(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op,
                             ConstMatrixRef c);

/// Largest power of two, at most 256, that divides an address.
int alignment_of(const void* address);

}  // namespace gyre
