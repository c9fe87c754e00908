// CUDA as the host sees it. A machine without a GPU gets a reason and the right error; a machine
// with one gets memory and streams.

#include "comm/cuda_device.hpp"
#include "comm/nccl_version.hpp"
#include "comm/staged.hpp"
#include "mpi_test.hpp"
#include "runtime/buffer.hpp"

#ifdef GYRE_WITH_CUDA
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_stream.hpp"
#endif

namespace gyre {
namespace GYRE_FILE {

#ifndef GYRE_WITH_CUDA

TEST(CudaHost, NeedsABuildWithCuda) {
  GTEST_SKIP() << "this build has no CUDA";
}

#else

class WithoutGpu : public testing::Test {
  void SetUp() override {
    if (usable_cuda_devices() > 0) GTEST_SKIP() << "this machine has a GPU";
  }
};

class WithGpu : public testing::Test {
  void SetUp() override {
    std::string why;
    if (usable_cuda_devices(&why) == 0) GTEST_SKIP() << why;
  }
};

/// The error that `action` throws.
template <class Action>
Error error_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  return Error(ExitCode::ok, "no error");
}

std::string environment_host() {
  return test::environment().peers()[0].host;
}

bool contains(const Error& error, const std::string& text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

TEST_F(WithoutGpu, TheReasonIsNamed) {
  std::string why;
  EXPECT_EQ(usable_cuda_devices(&why), 0);
  EXPECT_NE(why, "");
  EXPECT_NE(why.find("cudaError"), std::string::npos) << why;
}

TEST_F(WithoutGpu, ADeviceBufferIsARuntimeError) {
  const MemoryUse before = memory_use();
  const Error error = error_of([] { Buffer<float> buffer(250, MemorySpace::device); });
  EXPECT_EQ(error.code(), ExitCode::runtime);
  EXPECT_TRUE(contains(error, "no usable CUDA device for a buffer of ")) << error.what();
  EXPECT_EQ(memory_use().current_bytes, before.current_bytes);
}

TEST_F(WithoutGpu, AnEmptyDeviceBufferNeedsNoDevice) {
  EXPECT_EQ(Buffer<float>(0, MemorySpace::device).data(), nullptr);
}

TEST_F(WithoutGpu, AStreamIsARuntimeErrorWithTheCallAndItsPlace) {
  const Error error = error_of([] { make_cuda_stream(); });
  EXPECT_EQ(error.code(), ExitCode::runtime);
  EXPECT_TRUE(contains(error, "cudaStreamCreateWithFlags(")) << error.what();
  EXPECT_TRUE(contains(error, " at cuda_stream.cpp:")) << error.what();
}

TEST_F(WithoutGpu, ChoosingADeviceIsAnAgreedRuntimeError) {
  const Error error = error_of([] { bind_device(test::world()); });
  EXPECT_EQ(static_cast<int>(error.code()), 3);
  EXPECT_TRUE(error.agreed());
  EXPECT_TRUE(contains(error, "no usable CUDA device on host ")) << error.what();
}

TEST_F(WithoutGpu, ACommunicatorOfDeviceMemoryIsAnAgreedRuntimeError) {
  const Error error = error_of([] { make_staged_communicator(test::world()); });
  EXPECT_EQ(error.code(), ExitCode::runtime);
  EXPECT_TRUE(error.agreed());
  EXPECT_TRUE(contains(error, " on host " + environment_host())) << error.what();
}

TEST_F(WithoutGpu, PinnedMemoryIsARuntimeError) {
  const Error error = error_of([] { Buffer<float> buffer(250, MemorySpace::pinned); });
  EXPECT_EQ(error.code(), ExitCode::runtime);
  EXPECT_TRUE(contains(error, "no pinned memory for a buffer of ")) << error.what();
}

TEST_F(WithoutGpu, AFailedCallLeavesNoErrorBehind) {
  error_of([] { Buffer<float> buffer(250, MemorySpace::device); });
  error_of([] { make_cuda_stream(); });
  // Without a driver CUDA answers every call, this one included, with the same error.
  const cudaError_t left = cudaGetLastError();
  EXPECT_TRUE(left == cudaSuccess || means_no_device(left)) << describe_cuda(left);
}

TEST(CudaErrors, ADescriptionHasTextNameAndNumber) {
  EXPECT_EQ(describe_cuda(cudaErrorMemoryAllocation),
            std::string(cudaGetErrorString(cudaErrorMemoryAllocation)) +
                " (cudaErrorMemoryAllocation, 2)");
  EXPECT_TRUE(means_no_device(cudaErrorNoDevice));
  EXPECT_TRUE(means_no_device(cudaErrorInsufficientDriver));
  EXPECT_FALSE(means_no_device(cudaErrorMemoryAllocation));
}

TEST(Versions, AreThoseOfTheLibraries) {
#ifdef GYRE_SOFTGPU
  EXPECT_EQ(cuda_version().find("software GPU (seed "), 0U);
#ifdef GYRE_WITH_NCCL
  EXPECT_EQ(nccl_version(), "software GPU");
#endif
#else
  EXPECT_EQ(cuda_version(),
            fmt::format("{}.{}", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10));
#ifdef GYRE_WITH_NCCL
  EXPECT_EQ(nccl_version().substr(0, 2), "2.");
#endif
#endif
}

TEST_F(WithGpu, EveryRankGetsADevice) {
  const std::vector<RankDevice> devices = bind_device(test::world(), true);
  ASSERT_EQ(std::ssize(devices), test::world().size());
  EXPECT_EQ(devices[0].rank, 0);
  EXPECT_EQ(devices[0].host, environment_host());
  EXPECT_GE(devices[0].major, least_compute_capability);
  EXPECT_EQ(devices[0].uuid.size(), std::string("GPU-00112233-4455-6677-8899-aabbccddeeff").size());
  int current = -1;
  GYRE_CHECK_CUDA(cudaGetDevice(&current));
  EXPECT_EQ(current, devices[0].device);
}

TEST_F(WithGpu, DeviceMemoryKeepsWhatIsCopiedThere) {
  const std::unique_ptr<Stream> stream = make_cuda_stream();
  EXPECT_EQ(stream->space(), MemorySpace::device);
  Buffer<double> there(1000, MemorySpace::device);
  Buffer<double> here(there.size()), back(there.size());
  for (int64_t i = 0; i < here.size(); ++i) here[i] = static_cast<double>(i);
  const size_t bytes = here.span().size_bytes();
  const cudaStream_t handle = cuda_handle(*stream);
  GYRE_CHECK_CUDA(
      cudaMemcpyAsync(there.data(), here.data(), bytes, cudaMemcpyHostToDevice, handle));
  GYRE_CHECK_CUDA(
      cudaMemcpyAsync(back.data(), there.data(), bytes, cudaMemcpyDeviceToHost, handle));
  stream->synchronize();
  for (int64_t i = 0; i < here.size(); ++i) EXPECT_EQ(back[i], here[i]);
}

TEST_F(WithGpu, TooLargeABufferSaysWhatIsFree) {
  const Error error =
      error_of([] { Buffer<double> buffer(int64_t{1} << 50, MemorySpace::device); });
  EXPECT_EQ(error.code(), ExitCode::runtime);
  EXPECT_TRUE(contains(error, "bytes are free on device")) << error.what();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

#endif

}  // namespace GYRE_FILE
}  // namespace gyre
