#include <libxsmm.h>

#include <algorithm>

#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/gemm.hpp"

// libxsmm is column-major: cᵀ [n, m] = bᵀ [n, k] · aᵀ [k, m], as in gemm.cpp. A panel of b is
// widened, packed, and used for all rows of a, block by block.

namespace gyre {
namespace {

constexpr int64_t wide_columns = 64, wide_depth = 128, wide_rows = 64;

libxsmm_blasint to_blas_int(int64_t x) {
  return static_cast<libxsmm_blasint>(x);
}

libxsmm_dmmfunction f64_kernel(int64_t rows, int64_t columns, int64_t depth, int64_t a_stride,
                               int64_t c_stride, bool accumulate) {
  const libxsmm_blasint lda = to_blas_int(wide_columns), ldb = to_blas_int(a_stride),
                        ldc = to_blas_int(c_stride);
  const double alpha = 1, beta = accumulate ? 1 : 0;
  const int flags = LIBXSMM_GEMM_FLAG_NONE, prefetch = LIBXSMM_PREFETCH_NONE;
  const libxsmm_dmmfunction kernel =
      libxsmm_dmmdispatch(to_blas_int(columns), to_blas_int(rows), to_blas_int(depth), &lda, &ldb,
                          &ldc, &alpha, &beta, &flags, &prefetch);
  if (kernel == nullptr)
    throw_runtime("libxsmm has no f64 kernel for {} x {} x {} on this processor", rows, depth,
                  columns);
  return kernel;
}

}  // namespace

void gemm(MatrixView<const double> a, MatrixView<const float> b, MatrixView<double> c) {
  GYRE_CHECK(a.cols == b.rows && a.rows == c.rows && b.cols == c.cols,
             "[{}, {}] = [{}, {}] x [{}, {}]", c.rows, c.cols, a.rows, a.cols, b.rows, b.cols);
  Buffer<double> panel(wide_columns * wide_depth);
  for (int64_t n = 0; n < c.cols; n += wide_columns) {
    const int64_t columns = std::min(wide_columns, c.cols - n);
    for (int64_t k = 0; k < a.cols; k += wide_depth) {
      const int64_t depth = std::min(wide_depth, a.cols - k);
      for (int64_t l = 0; l < depth; ++l)
        std::copy_n(b.row(k + l) + n, columns, panel.data() + l * wide_columns);
      for (int64_t m = 0; m < c.rows; m += wide_rows) {
        const int64_t rows = std::min(wide_rows, c.rows - m);
        f64_kernel(rows, columns, depth, std::max(a.stride, a.cols), std::max(c.stride, c.cols),
                   k > 0)(panel.data(), a.row(m) + k, c.row(m) + n);
      }
    }
  }
}

}  // namespace gyre
