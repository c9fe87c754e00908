// cuDNN's attention on the GPU against the double-precision reference, and that it is cuDNN's: what
// it refuses would go to the tiled kernel, and pass. Outputs of rows that no rectangle covers are
// NaN and have to stay so; inputs there are numbers, except where a test says otherwise.

#include <cuda_runtime_api.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention/kernels/cudnn_kernel.hpp"
#include "attention_kernel_cases.hpp"
#include "runtime/cuda_check.hpp"

namespace gyre {
namespace {

using namespace test::attention_kernel;

class CudnnKernelGpu : public KernelTest {
 protected:
  void SetUp() override {
#ifdef GYRE_WITH_CUDNN
    std::string why;
    if (cudnn_version(&why).empty()) GTEST_SKIP() << why;
    KernelTest::SetUp();
#else
    GTEST_SKIP() << "this build has no cuDNN";
#endif
  }
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
#ifdef GYRE_WITH_CUDNN
    return make_cudnn_kernel(stream);
#else
    (void)stream;
    return nullptr;
#endif
  }

  void expect_cudnn() {
    EXPECT_EQ(kernel().note().find("tiled kernel"), std::string::npos) << kernel().note();
  }
  /// Whether cuDNN has gradients of ragged batches for this device.
  static bool has_gradients() {
    int device = 0, major = 0;
    GYRE_CHECK_CUDA(cudaGetDevice(&device));
    GYRE_CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
  }

  /// cuDNN against the reference, forward and backward.
  void check_cudnn(const Problem& p) {
    const Forward want = reference_forward(p);
    EXPECT_LE(worst_error(p, forward(p), want), 1) << "forward, share of the tolerance";
    expect_cudnn();
    const Backward got = backward(p, want);
    EXPECT_LE(worst_error(p, got, reference_backward(p, want)), 1)
        << "backward, share of the tolerance";
    if (has_gradients()) expect_cudnn();
  }
};

/// A problem for cuDNN; `outside`: inputs that no rectangle covers are numbers, not NaN.
Problem problem(BlockHeads heads, int64_t rows, int64_t keys, std::vector<Rectangle> rectangles,
                Types types = bf16_in, bool outside = true) {
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
    rectangles.push_back({LocalToken(rows), q_length, LocalToken(keys), k_length, mask});
    rows += q_length + 3;
    keys += k_length + 2;
  }
  Problem problem(BlockHeads heads, Types types = bf16_in, bool outside = true) const {
    return gyre::problem(heads, rows, keys, rectangles, types, outside);
  }
};
constexpr int64_t around_tiles[] = {1, 65, 129};

TEST_F(CudnnKernelGpu, FullMasks) {
  for (const int64_t keys : around_tiles) {
    SCOPED_TRACE(keys);
    Lengths lengths;  // 3 entries of a batch of 4
    for (const int64_t rows : around_tiles) lengths.add(rows, keys);
    check_cudnn(lengths.problem(heads_of(2, 1, 64)));
  }
}

TEST_F(CudnnKernelGpu, CausalSquares) {
  Lengths lengths;
  for (const int64_t length : around_tiles) lengths.add(length, length, {true, 0});
  for (const Types types : {bf16_in, all_bf16})
    check_cudnn(lengths.problem(heads_of(2, 1, 64), types));
}

TEST_F(CudnnKernelGpu, CausalEnds) {
  for (const int64_t more : {1, 64, 127}) {
    SCOPED_TRACE(more);
    Lengths lengths;
    for (const int64_t length : around_tiles)
      lengths.add(length, length + more, {true, more});  // of the last query: all keys
    check_cudnn(lengths.problem(heads_of(2, 1, 64)));
  }
}

TEST_F(CudnnKernelGpu, DiagonalsThatBeginOrEndInside) {
  // Queries that see nothing, a diagonal, and queries that see all: up to two entries for each.
  for (const int64_t offset : {-120, -64, -17, 0, 63, 99, 200}) {
    SCOPED_TRACE(offset);
    check_cudnn(problem(heads_of(2, 1, 64), 200, 140, {causal(3, 190, 2, 130, offset)}));
  }
}

TEST_F(CudnnKernelGpu, OneEntryFarBehindTheBegin) {
  for (const int64_t offset : {0, 100}) {
    SCOPED_TRACE(offset);
    check_cudnn(problem(heads_of(2, 1, 64), 50310, 20410,
                        {causal(50000, 300, 20000, 300 + offset, offset)}));
  }
}

TEST_F(CudnnKernelGpu, KeysThatDescendAndOverlap) {
  // The last rectangle is not the one that ends last, and keys are shared by up to three.
  check_cudnn(problem(heads_of(2, 1, 64), 300, 420,
                      {full(0, 64, 260, 150), full(64, 70, 200, 129), full(134, 65, 130, 140),
                       full(199, 100, 5, 200)}));
}

TEST_F(CudnnKernelGpu, SeveralRectanglesForTheSameRows) {
  check_cudnn(problem(heads_of(2, 1, 64), 130, 400,
                      {full(0, 130, 0, 70), causal(0, 130, 150, 130, 0), full(50, 60, 80, 65),
                       full(60, 1, 380, 20), causal(120, 10, 360, 20, -3)}));
}

TEST_F(CudnnKernelGpu, ScoresFarBelowZero) {
  // Tiles of keys are longer than 64, and 192 is one and a half. All scores are near -100: a key
  // that is not there, with a score of 0, would weigh exp(90), which is infinite in f32.
  for (const int64_t keys : {64, 192}) {
    SCOPED_TRACE(keys);
    Problem p = problem(heads_of(2, 1, 64), 70, keys, {full(0, 70, 0, keys)});
    constexpr float shift = 3.5F, spread = 0.25F;
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < p.q.cols(); ++c) p.q.set(r, c, shift + spread * p.q(r, c));
    for (int64_t r = 0; r < p.keys; ++r)
      for (int64_t c = 0; c < p.kv_width(); ++c) p.kv.set(r, c, -shift + spread * p.kv(r, c));
    p.magnified = 100;
    p.gradient_term = shift;
    EXPECT_LT(reference_forward(p).lse(0, 0), -std::log(std::numeric_limits<float>::max()));
    check_cudnn(p);
  }
}

TEST_F(CudnnKernelGpu, GroupedQueries) {
  Lengths lengths;
  for (const int64_t length : {65, 129}) lengths.add(length, length, {true, 0});
  for (const auto& [heads, kv_heads] : {std::pair{4, 4}, {4, 2}, {6, 2}, {5, 1}}) {
    SCOPED_TRACE(testing::Message() << heads << " heads over " << kv_heads);
    check_cudnn(lengths.problem(heads_of(heads, kv_heads, 64)));
  }
  check_cudnn(lengths.problem({3, 1, 64, 8, 5, 0.25F}));  // the last heads of a group
}

TEST_F(CudnnKernelGpu, HeadDimensions) {
  Lengths lengths;
  for (const int64_t length : {65, 129}) lengths.add(length, length + 64, {true, 64});
  for (const int64_t dim : {64, 96, 128}) {
    SCOPED_TRACE(dim);
    check_cudnn(lengths.problem(heads_of(2, 1, dim)));
  }
}

TEST_F(CudnnKernelGpu, NotANumberInRowsOutsideDoesNotMatter) {
  Lengths whole, squares, ends;
  for (const int64_t length : around_tiles) {
    whole.add(length, length);
    squares.add(length, length, {true, 0});
    ends.add(length, length + 64, {true, 64});
  }
  for (const Lengths& lengths : {whole, squares, ends})
    check_cudnn(lengths.problem(heads_of(2, 1, 64), bf16_in, false));
}

TEST_F(CudnnKernelGpu, TwoCallsAreOne) {
  for (const Types types : {bf16_in, all_bf16}) {
    const Problem p = problem(heads_of(2, 1, 64), 70, 200, {full(0, 70, 0, 200)}, types);
    const Forward want = reference_forward(p);
    Forward parts = p.cleared();
    Backward gradients = p.no_gradients();
    for (const auto& [begin, keys] : {std::pair{130, 70}, {0, 1}, {1, 129}}) {
      const Rectangle part = full(0, 70, begin, keys);
      add(p, {&part, 1}, parts);
      add(p, {&part, 1}, want, gradients);
    }
    EXPECT_LE(worst_error(p, parts, want, 3), 1);
    EXPECT_LE(worst_error(p, gradients, reference_backward(p, want), 3), 1);
    if (has_gradients()) expect_cudnn();
  }
}

}  // namespace
}  // namespace gyre
