#pragma once
// f32 matrix products of the CPU backend, by libxsmm, which generates kernels per shape at run
// time.

#include "core/matrix_ref.hpp"
#include "core/view.hpp"

namespace gyre {

/// c [m, n] = a [m, k] · b [k, n], or c += if `accumulate`. Row-major views with any strides; b is
/// f32, or bf16 that is widened. Single-threaded; blocked so that both operands stay in cache;
/// bit-identical from run to run.
void gemm(MatrixView<const float> a, ConstMatrixRef b, MatrixView<float> c,
          bool accumulate = false);
/// c = aᵀ · b, or c +=, with a [k, m]; else as gemm. Nothing is transposed in memory.
void gemm_a_transposed(MatrixView<const float> a, ConstMatrixRef b, MatrixView<float> c,
                       bool accumulate = false);
/// c = a · bᵀ, or c +=, with b [n, k]; else as gemm. Each call transposes b panel by panel.
void gemm_b_transposed(MatrixView<const float> a, ConstMatrixRef b, MatrixView<float> c,
                       bool accumulate = false);

/// A call may be split along the columns of c into calls of multiples of this many columns; the
/// results are bit-identical.
inline constexpr int64_t gemm_panel_columns = 64;

/// c [m, n] = a [m, k] · b [k, n] in double precision, with b widened, for large references.
void gemm(MatrixView<const double> a, MatrixView<const float> b, MatrixView<double> c);

/// Serial reference that accumulates in double precision.
void gemm_reference(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
                    bool accumulate = false);

}  // namespace gyre
