// Row statistics and row gradients on the device: the suites of every backend.

#include "logprobs/cuda_row_kernels.hpp"
#include "row_statistics_cases.hpp"
#include "row_transform_cases.hpp"

namespace gyre::test::row_kernels {

GYRE_RUN_ON(device, RowStatistics);
GYRE_RUN_ON(device, RowGradient);
GYRE_RUN_ON(device, RowTransform);

using CudaRowPasses = RowKernelTest;
GYRE_RUN_ON(device, CudaRowPasses);

TEST_P(CudaRowPasses, ManyPassesReuseTheirMemory) {
  // More passes in a row than there are places for what they upload, none of them waited for.
  std::vector<DeviceMatrix> outs;
  for (int i = 0; i < 10; ++i) outs.emplace_back(2, 9, DType::f32, stream());
  for (int i = 0; i < 10; ++i) {
    const std::vector<int32_t> ids = {i % 9, (i + 1) % 9};
    const std::vector<float> weights(2, static_cast<float>(i + 1));
    kernels().scatter_token_weights({ids, weights, 1, 0}, 9, outs[i].ref(), 1);
  }
  for (int i = 0; i < 10; ++i) {
    const Matrix got = outs[i].host();
    for (int64_t v = 0; v < 9; ++v) {
      EXPECT_EQ(got.at(0, v), v == i % 9 ? i + 1 : 0);
      EXPECT_EQ(got.at(1, v), v == (i + 1) % 9 ? i + 1 : 0);
    }
  }
}

TEST(CudaRowKernels, OnlyADevicesStreamWillDo) {
  HostStream host;
  EXPECT_ANY_THROW(make_cuda_row_kernels(host));
}

}  // namespace gyre::test::row_kernels
