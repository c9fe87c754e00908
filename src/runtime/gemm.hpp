#pragma once
// Matrix products of the CPU backend, f32, by libxsmm (kernels generated for the shape at run
// time).

#include "core/matrix_ref.hpp"
#include "core/view.hpp"

namespace gyre {

/// c [m, n] = a [m, k] · b [k, n], or c += when `accumulate`. Row-major views with any strides; b
/// is f32 or bf16, which is widened; single-threaded, blocked over rows of c so that b stays in
/// cache; bit-identical from run to run.
void gemm(MatrixView<const float> a, ConstMatrixRef b, MatrixView<float> c,
          bool accumulate = false);
/// The same with aᵀ: a [k, m]. Nothing is transposed in memory.
void gemm_a_transposed(MatrixView<const float> a, ConstMatrixRef b, MatrixView<float> c,
                       bool accumulate = false);
/// The same with bᵀ: b [n, k]. Transposed in small pieces, once a call.
void gemm_b_transposed(MatrixView<const float> a, ConstMatrixRef b, MatrixView<float> c,
                       bool accumulate = false);

/// Calls of any of them may be split by columns of c, without a change of bits, into calls of
/// multiples of so many columns.
inline constexpr int64_t gemm_panel_columns = 64;

/// Serial double-precision-accumulating twin.
void gemm_reference(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
                    bool accumulate = false);

}  // namespace gyre
