#include "runtime/xsmm_kernel.hpp"

#include "core/error.hpp"

namespace gyre {

libxsmm_smmfunction xsmm_kernel(const SmallProduct& p) {
  const auto narrow = [](int64_t x) { return static_cast<libxsmm_blasint>(x); };
  const libxsmm_blasint lda = narrow(p.b_stride), ldb = narrow(p.a_stride),
                        ldc = narrow(p.c_stride);
  const float alpha = 1, beta = p.accumulate ? 1.0F : 0.0F;
  const int flags = p.a_transposed ? LIBXSMM_GEMM_FLAG_TRANS_B : LIBXSMM_GEMM_FLAG_NONE;
  const int prefetch = LIBXSMM_PREFETCH_NONE;
  const libxsmm_smmfunction kernel =
      libxsmm_smmdispatch(narrow(p.columns), narrow(p.rows), narrow(p.depth), &lda, &ldb, &ldc,
                          &alpha, &beta, &flags, &prefetch);
  if (kernel == nullptr)
    throw_runtime("libxsmm has no f32 kernel for {} x {} x {} on this processor", p.rows, p.depth,
                  p.columns);
  return kernel;
}

}  // namespace gyre
