#pragma once
// Matrix products on the device.

#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

enum class Transpose { no, yes };

/// c [m, n] = op(a) · op(b), or c += if `accumulate`, where op(a) is a [m, k] or the transpose of a
/// [k, m], and op(b) is b [k, n] or the transpose of b [n, k]. Row-major device matrices with any
/// strides; a and b both f32 or both bf16, c of their type or f32. Sums are f32; f32 products are
/// exact f32 (no TF32). Uses cuBLASLt, or our own kernel if cuBLASLt or an algorithm is missing.
/// Throws a usage error that names the shapes if they do not fit, a runtime error if the library
/// fails.
///
/// Asynchronous on `stream`. All products on a device must use one stream, because they share one
/// cuBLASLt workspace (32 MiB).
void cuda_gemm(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op, MatrixRef c,
               bool accumulate, Stream& stream);

/// The product of cuda_gemm by our own kernel, used without cuBLASLt and to check it. The bits of
/// an element depend only on its row of op(a) and its column of op(b).
void cuda_gemm_plain(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op,
                     MatrixRef c, bool accumulate, Stream& stream);

}  // namespace gyre
