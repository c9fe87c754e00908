// Attention on the GPU: the suite of every kernel, and tests of what only the GPU's kernel has.

#include "attention_kernel_suite.hpp"
#include "core/error.hpp"
#include "errors.hpp"

namespace gyre::test::attention_kernel {

GYRE_RUN_ON(device, AttentionKernel);

class AttentionKernelGpu : public KernelTest {
 protected:
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
    return make_cuda_kernel(stream);
  }
};

/// The kernel with the tiles for `kib` KiB of shared memory an SM: for compute capability 8.0 tall
/// and narrow tiles and a few wide ones, for 8.6 wide ones.
template <int kib>
class OtherTiles : public KernelTest {
 protected:
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
    return make_cuda_kernel(stream, int64_t{kib} << 10);
  }
};
using TilesOfEightZeroGpu = OtherTiles<164>;
using TilesOfEightSixGpu = OtherTiles<100>;

TEST_F(TilesOfEightZeroGpu, AgreeWithTheReference) {
  for (const int64_t dim : {128, 256})
    for (const Types types : {bf16_in, all_bf16})
      check(Problem(heads_of(2, 1, dim), 150, 150, {causal(0, 70, 0, 90, 10), full(70, 80, 90, 60)},
                    types));
  EXPECT_EQ(kernel().note(), "");
}

TEST_F(TilesOfEightSixGpu, AgreeWithTheReference) {
  for (const int64_t dim : {64, 96, 128})
    for (const Types types : {bf16_in, all_bf16})
      check(Problem(heads_of(2, 1, dim), 100, 150, {causal(0, 70, 0, 90, 10), full(70, 30, 90, 60)},
                    types));
  EXPECT_EQ(kernel().note(), "");
}

TEST_F(AttentionKernelGpu, FixedTilesGiveTheSameBitsHoweverRectanglesAreDealt) {
  for (const Types types : {all_f32, all_bf16}) {
    const std::vector<Rectangle> r{full(0, 90, 0, 70), full(0, 60, 70, 40),
                                   causal(20, 70, 110, 70, 0)};
    Problem p(heads_of(2, 1, 24), 90, 180, r, types);
    p.fixed_tiles = true;
    const Forward whole = forward(p);
    const Backward gradients = backward(p, whole);
    Forward parts = p.cleared();
    Backward part_gradients = p.no_gradients();
    for (const Rectangle& one : r) add(p, {&one, 1}, parts);
    for (const Rectangle& one : r) add(p, {&one, 1}, whole, part_gradients);
    EXPECT_TRUE(parts == whole);
    EXPECT_TRUE(part_gradients == gradients);
  }
}

TEST_F(AttentionKernelGpu, ListsOfRectanglesAreKeptAndForgotten) {
  const auto at = [](int64_t key) {
    return Problem(heads_of(1, 1, 4), 2, 300, {full(0, 1, key, 1)});
  };
  const auto check_forward = [&](int64_t key) {
    const Problem p = at(key);
    EXPECT_LE(worst_error(p, forward(p), reference_forward(p)), 1) << key;
  };
  for (int64_t key = 0; key < 280; ++key) check_forward(key);  // more than are kept
  check_forward(0);
  check_forward(279);
}

TEST_F(AttentionKernelGpu, CallsProgressOnce) {
  Problem p(heads_of(1, 1, 8), 10, 10, {causal(0, 10, 0, 10, 0)});
  int calls = 0;
  p.progress = [&calls] { ++calls; };
  const Forward of = forward(p);
  EXPECT_EQ(calls, 1);
  (void)backward(p, of);
  EXPECT_EQ(calls, 2);
}

TEST_F(AttentionKernelGpu, WhatItDoesNotTakeIsAUsageError) {
  const auto expect_usage = [&](const ForwardBlock& block, const std::string& text) {
    const std::string message = usage_message([&] { kernel().forward(block); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  ForwardBlock block;
  block.heads = heads_of(1, 1, 257);
  expect_usage(block, "heads of 257 elements: the CUDA attention kernel takes 1 to 256");
  block.heads.head_dim = 8;
  block.heads.scale = 0;
  expect_usage(block, "a scale of 0: the CUDA attention kernel takes positive ones");
  block.heads.scale = 1;
  block.k.type = DType::bf16;
  expect_usage(block, "k of bf16");
  block.k.type = DType::f32;
  block.v.type = DType::bf16;
  expect_usage(block, "v of bf16");
  block.v.type = DType::f32;
  block.out.type = DType::f64;
  expect_usage(block, "out of f64");
  block.q.type = DType::f64;
  expect_usage(block, "q of f64");
}

}  // namespace gyre::test::attention_kernel
