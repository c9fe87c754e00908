// Matrix products on the device, by the library and by our own kernel. Without
// cuBLASLt both are our own.

#include "gemm_cases.hpp"

namespace gyre::test::gemm_suite {

GYRE_RUN_ON(device, Gemm);

using CudaGemm = GpuTest;

TEST_F(CudaGemm, ShapesThatDoNotFitAreAUsageError) {
  Buffer<float> x(64, MemorySpace::device);
  EXPECT_THROW(cuda_gemm(x.matrix(2, 3), Transpose::no, x.matrix(4, 5), Transpose::no,
                         x.matrix(2, 5), false, stream()),
               Error);
}

}  // namespace gyre::test::gemm_suite
