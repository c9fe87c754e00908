#pragma once
// Matrix products on the device.

#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

enum class Transpose { no, yes };

/// c [m, n] = op(a) · op(b), or c += when `accumulate`, where op(a) is a [m, k] or the transpose of
/// a [k, m], and op(b) b [k, n] or the transpose of b [n, k]. Row-major device matrices with any
/// strides; a and b of one type, f32 or bf16, c of theirs or f32. Sums are f32; products of f32 are
/// f32's (no TF32). By cuBLASLt, and where that is not there by a kernel of our own. Throws a usage
/// error that names the shapes when they do not fit, a runtime error when the library refuses.
void cuda_gemm(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op, MatrixRef c,
               bool accumulate, Stream& stream);

}  // namespace gyre
