// The building blocks of kernels, as kernels see them.

#include <numeric>
#include <vector>

#include "gpu_test.hpp"
#include "mpi_test.hpp"
#include "runtime/device_code.cuh"

namespace gyre {
namespace {

using DeviceCode = test::GpuTest;

__global__ void reverse_block(const int* from, int* to, int count) {
  auto* shared = reinterpret_cast<int*>(dynamic_shared());
  const int begin = static_cast<int>(blockIdx.x * blockDim.x), i = static_cast<int>(threadIdx.x);
  if (begin + i < count) shared[i] = from[begin + i];
  __syncthreads();
  const int last = min(static_cast<int>(blockDim.x), count - begin) - 1;
  if (i <= last) to[begin + i] = shared[last - i];
}

TEST_F(DeviceCode, SharedMemoryIsTheBlocks) {
  std::vector<int> values(1000);
  std::iota(values.begin(), values.end(), 0);
  const Buffer<int> from = to_device<int>(values);
  Buffer<int> to(1000, MemorySpace::device);
  launch({4, 256, handle(), 256 * sizeof(int)}, reverse_block, from.data(), to.data(), 1000);
  const std::vector<int> result = to_host(to);
  for (int i = 0; i < 1000; ++i) {
    const int begin = i / 256 * 256, last = std::min(begin + 255, 999);
    EXPECT_EQ(result[i], last - (i - begin));
  }
}

__global__ void warp_functions(float* out) {
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  const auto warp = static_cast<float>(threadIdx.x / warp_lanes);
  const auto x = static_cast<float>(lane);
  out[threadIdx.x] = warp_sum(x) + 1000 * warp_max(x + warp) +
                     100000 * __shfl_sync(all_lanes, x, 5) +
                     (__ballot_sync(all_lanes, lane % 2) == 0xaaaaaaaaU ? 0.5F : 0);
}

TEST_F(DeviceCode, WarpsAreOfThirtyTwoLanes) {
  Buffer<float> out(96, MemorySpace::device);
  launch({1, 96, handle()}, warp_functions, out.data());
  const std::vector<float> result = to_host(out);
  for (size_t i = 0; i < 96; ++i)
    EXPECT_EQ(result[i], 496 + 1000 * (31 + static_cast<float>(i / 32)) + 500000 + 0.5F);
}

__global__ void copy_through_shared(const uint4* from, uint4* to) {
  auto* shared = reinterpret_cast<uint4*>(dynamic_shared());
  copy_async(&shared[threadIdx.x], &from[threadIdx.x], threadIdx.x == 3 ? 8 : 16);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  store_once(&to[threadIdx.x], shared[(threadIdx.x + 1) % blockDim.x]);
}

TEST_F(DeviceCode, AsynchronousCopiesArriveAndTheirRestIsZero) {
  std::vector<uint4> values(64);
  for (unsigned i = 0; i < 64; ++i) values[i] = {i, i + 100, i + 200, i + 300};
  const Buffer<uint4> from = to_device<uint4>(values);
  Buffer<uint4> to(64, MemorySpace::device);
  launch({1, 64, handle(), 64 * sizeof(uint4)}, copy_through_shared, from.data(), to.data());
  const std::vector<uint4> result = to_host(to);
  for (unsigned i = 0; i < 64; ++i) {
    const unsigned from_thread = (i + 1) % 64;
    EXPECT_EQ(result[i].x, from_thread);
    EXPECT_EQ(result[i].w, from_thread == 3 ? 0 : from_thread + 300);
  }
}

__global__ void exponentials(const float* x, float* y) {
  y[threadIdx.x] = fast_exp2(x[threadIdx.x]);
}

TEST_F(DeviceCode, TheFastExponentialIsGoodTo22Bits) {
  std::vector<float> x;
  for (int i = 0; i < 255; ++i) x.push_back(-0.37F * static_cast<float>(i));
  x.push_back(-std::numeric_limits<float>::infinity());
  const Buffer<float> from = to_device<float>(x);
  Buffer<float> to(256, MemorySpace::device);
  launch({1, 256, handle()}, exponentials, from.data(), to.data());
  const std::vector<float> y = to_host(to);
  for (size_t i = 0; i < 255; ++i) {
    const double want = std::exp2(static_cast<double>(x[i]));
    EXPECT_NEAR(static_cast<double>(y[i]), want, want * 0x1p-21 + 1e-37) << x[i];
  }
  EXPECT_EQ(y[255], 0);
}

TEST_F(DeviceCode, AGridWithoutBlocksIsNothingToDo) {
  launch({0, 256, handle()}, warp_functions, nullptr);
  stream().synchronize();
}

TEST_F(DeviceCode, ALaunchThatNoDeviceCanDoIsARuntimeError) {
  EXPECT_THROW(launch({1, 4096, handle()}, warp_functions, nullptr), Error);
}

}  // namespace
}  // namespace gyre
