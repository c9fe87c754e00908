#pragma once
// Matrix products on the device.

#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

enum class Transpose { no, yes };

/// c [m, n] = op(a) · op(b), or c += when `accumulate`, where op(a) is a [m, k] or the transpose of
/// a [k, m], and op(b) b [k, n] or the transpose of b [n, k]. Row-major device matrices with any
/// strides; a and b of one type, f32 or bf16, c of theirs or f32. Sums are f32; products of f32 are
/// f32's (no TF32). By cuBLASLt, and where that is not there, or has no algorithm, by a kernel of
/// our own. Throws a usage error that names the shapes when they do not fit, a runtime error when
/// the library refuses.
///
/// Asynchronous on `stream`. cuBLASLt's scratch memory (32 MiB) is one for each device, so that all
/// products on a device belong on one stream.
void cuda_gemm(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op, MatrixRef c,
               bool accumulate, Stream& stream);

/// The same by the kernel of our own: where there is no cuBLASLt, and as a second opinion of it.
/// The bits of an element depend on its row of op(a) and its column of op(b) only.
void cuda_gemm_plain(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op,
                     MatrixRef c, bool accumulate, Stream& stream);

}  // namespace gyre
