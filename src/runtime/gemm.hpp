#pragma once
// Matrix products of the CPU backend, f32, by libxsmm (kernels generated for the shape at run
// time).

#include "core/view.hpp"

namespace gyre {

/// c [m, n] = a [m, k] · b [k, n], or c += when `accumulate`. Row-major views with any strides;
/// single-threaded, blocked over rows of c so that b stays in cache; bit-identical from run to run.
void gemm(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
          bool accumulate = false);

/// Serial double-precision-accumulating twin.
void gemm_reference(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
                    bool accumulate = false);

}  // namespace gyre
