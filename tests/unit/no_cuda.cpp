// A build without CUDA has no device: whatever asks for one gets a runtime error that says so.

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "attention/array_ops.hpp"
#include "attention/kernels/make_kernel.hpp"
#include "comm/cuda_device.hpp"
#include "comm/nccl.hpp"
#include "comm/nccl_version.hpp"
#include "comm/staged.hpp"
#include "errors.hpp"
#include "layout_cases.hpp"
#include "logprobs/fused_linear/fused_linear_ops.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "model/decoder_ops.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_memory.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/features.hpp"
#include "runtime/row_copy.hpp"
#include "sharding/stream_shards.hpp"

namespace gyre {
namespace GYRE_FILE {

/// A stream that says that it is a device's.
class StreamOfNoDevice final : public Stream {
 public:
  MemorySpace space() const override { return MemorySpace::device; }
  void synchronize() override {}
  MarkPtr mark() override { return nullptr; }
  void copy(void*, const void*, size_t) override {}
  void fill(void*, std::byte, size_t) override {}
};

class NoCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (with_cuda) GTEST_SKIP() << "this build has CUDA";
  }
  static void expect_error(const std::string& message, const std::function<void()>& work) {
    try {
      work();
      ADD_FAILURE() << "no error: " << message;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::runtime);
      EXPECT_EQ(error.what(), message);
    }
  }
  StreamOfNoDevice stream;
};

TEST_F(NoCuda, MemoryAndStreams) {
  expect_error("no device memory for a buffer of 1024 bytes: this build has no CUDA",
               [] { Buffer<float> buffer(250, MemorySpace::device); });
  expect_error("no pinned memory for a buffer of 64 bytes: this build has no CUDA",
               [] { Buffer<char> buffer(1, MemorySpace::pinned); });
  EXPECT_EQ(Buffer<float>(0, MemorySpace::device).data(), nullptr);
  expect_error("memory of a GPU: this build has no CUDA", [] { cuda_memory_available(); });
  expect_error("a stream of a GPU: this build has no CUDA", [] { make_cuda_stream(); });
}

TEST_F(NoCuda, Communication) {
  EXPECT_EQ(cuda_version(), "no");
  EXPECT_EQ(nccl_version(), "no");
  expect_error("choosing a CUDA device: this build has no CUDA",
               [] { bind_device(test::world()); });
  expect_error("staged communication of GPU memory: this build has no CUDA",
               [] { make_staged_communicator(test::world()); });
  expect_error("communication by NCCL: this build has no NCCL",
               [] { make_nccl_communicator(test::world()); });
}

TEST_F(NoCuda, Attention) {
  expect_error("attention kernel tiled: this build has no CUDA",
               [&] { make_block_kernel(stream, {.activations = DType::bf16}); });
  expect_error("attention kernel cudnn: this build has no cuDNN",
               [&] { make_block_kernel(stream, {.name = "cudnn"}); });
}

TEST_F(NoCuda, OtherModules) {
  LayoutOptions options;
  options.cp = 2;
  const Layout layout = contiguous(test::full_bounds({8}).view(), options);
  expect_error("sharding on a GPU: this build has no CUDA",
               [&] { make_stream_shards(layout, stream); });
  float element = 0;
  expect_error("rows on a GPU: this build has no CUDA",
               [&] { fill(MatrixView<float>(&element, 1, 1), 1, stream); });
  expect_error("row passes on a GPU: this build has no CUDA", [&] { make_row_kernels(stream); });
  expect_error("the fused linear layer on a GPU: this build has no CUDA",
               [&] { make_linear_ops(stream, cpu_row_kernels()); });
  expect_error("copies on a GPU: this build has no CUDA", [&] { copy_rows({}, stream); });
  expect_error("a decoder on a GPU: this build has no CUDA", [&] { make_decoder_ops(stream); });
}

TEST(KernelChoice, TheHostHasOneKernelAndADeviceSome) {
  EXPECT_EQ(kernel_name({.name = "tiled"}, MemorySpace::host), "cpu");
  EXPECT_EQ(kernel_name({.activations = DType::f32}, MemorySpace::device), "tiled");
  EXPECT_EQ(kernel_name({.name = "cudnn"}, MemorySpace::device), "cudnn");
  if (!with_cudnn) {
    EXPECT_EQ(kernel_name({.activations = DType::bf16}, MemorySpace::device), "tiled");
  }
  StreamOfNoDevice stream;
  test::expect_usage("attention kernel fast; there are auto, tiled, cudnn",
                     [&] { make_block_kernel(stream, {.name = "fast"}); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
