#pragma once
// The kernel around a library's attention under test: with a plain library, which runs everywhere,
// and with cuDNN where it is. What the library refuses goes to the tiled kernel, and would pass, so
// that tests also ask who did it.

#include <cuda_runtime_api.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/kernels/cuda_ragged_kernel.hpp"
#include "attention/kernels/cudnn_kernel.hpp"
#include "attention_kernel_cases.hpp"
#include "plain_attention.hpp"
#include "runtime/cuda_check.hpp"

namespace gyre::test::ragged_kernel {

using namespace attention_kernel;

/// With the plain library.
class PlainKernelGpu : public KernelTest {
 protected:
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
    return make_ragged_kernel(stream, make_plain_attention(stream, plain_));
  }
  void TearDown() override {
    if (plain_.dropped.size() == 0) return;  // skipped, or another library
    EXPECT_EQ(to_host(plain_.dropped)[0], 0) << "rows that the library did not reach";
    EXPECT_EQ(plain_.empty, 0) << "entries without rows, which cuDNN 9.19 does not take";
  }
  PlainAttention& plain() { return plain_; }
  /// The kernel's note without its last part, the number of graphs.
  std::string remarks() {
    const std::string note = kernel().note();
    if (note.find(" graphs built") == std::string::npos) return note;
    const size_t last = note.rfind("; ");
    return last == std::string::npos ? "" : note.substr(0, last);
  }

 private:
  PlainAttention plain_;
};

/// With each library; "even" is the plain one that takes even batches as such.
class RaggedKernelGpu : public PlainKernelGpu, public testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
#ifdef GYRE_WITH_CUDNN
    std::string why;
    if (!is_plain() && cudnn_version(&why).empty()) GTEST_SKIP() << why;
#endif
    KernelTest::SetUp();
  }
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
#ifdef GYRE_WITH_CUDNN
    if (!is_plain()) return make_cudnn_kernel(stream);
#endif
    if (GetParam() == "even") plain().least_even_queries = 1;
    return PlainKernelGpu::make_kernel(stream);
  }

  static bool is_plain() {
    return GetParam() != "cudnn";
  }
  /// cuDNN's is one that it surely has.
  static int64_t head_dim() {
    return is_plain() ? 16 : 64;
  }

  void expect_library() {
    EXPECT_EQ(kernel().note().find("tiled kernel"), std::string::npos) << kernel().note();
  }
  /// Whether the library has gradients of ragged batches for this device.
  static bool has_gradients() {
    int device = 0, major = 0;
    GYRE_CHECK_CUDA(cudaGetDevice(&device));
    GYRE_CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return is_plain() || major >= 9;
  }

  /// The library against the reference, forward and backward.
  void check_library(const Problem& p) {
    const Forward want = reference_forward(p);
    EXPECT_LE(worst_error(p, forward(p), want), 1) << "forward, share of the tolerance";
    expect_library();
    const Backward got = backward(p, want);
    EXPECT_LE(worst_error(p, got, reference_backward(p, want)), 1)
        << "backward, share of the tolerance";
    if (has_gradients()) expect_library();
  }
};

inline std::vector<std::string> libraries() {
#ifdef GYRE_WITH_CUDNN
  return {"plain", "even", "cudnn"};
#else
  return {"plain", "even"};
#endif
}

/// A problem for a library; `outside`: inputs that no rectangle covers are numbers, not NaN.
inline Problem problem(BlockHeads heads, int64_t rows, int64_t keys,
                       std::vector<Rectangle> rectangles, Types types = bf16_in,
                       bool outside = true) {
  Problem p(heads, rows, keys, std::move(rectangles), types);
  p.narrow_partials = true;
  if (outside) {
    std::mt19937 random(77);
    for (Matrix* input : {&p.q, &p.kv, &p.d_out}) input->fill(0, input->rows(), random);
  }
  return p;
}

/// Queries of each length against keys of each length, every one at rows of its own with a gap
/// behind it.
struct Lengths {
  std::vector<Rectangle> rectangles;
  int64_t rows = 2, keys = 1;
  void add(int64_t q_length, int64_t k_length, Mask mask = {}) {
    rectangles.push_back({rows, q_length, keys, k_length, mask});
    rows += q_length + 3;
    keys += k_length + 2;
  }
  Problem problem(BlockHeads heads, Types types = bf16_in, bool outside = true) const {
    return ragged_kernel::problem(heads, rows, keys, rectangles, types, outside);
  }
};
inline constexpr int64_t around_tiles[] = {1, 65, 129};

}  // namespace gyre::test::ragged_kernel
