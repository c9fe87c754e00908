// Attention on the GPU against the double-precision reference. What no rectangle covers, and what
// lies between rows, is NaN, and has to stay as it is.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "attention/kernels/cuda_kernel.hpp"
#include "attention_kernel_cases.hpp"
#include "core/error.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test::attention_kernel;

class AttentionKernelGpu : public KernelTest {
 protected:
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
    return make_cuda_kernel(stream);
  }
};

/// As on devices with so much shared memory an SM: on 8.0 tall tiles, narrow ones and a few wide
/// ones; on 8.6 wide ones.
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

// Two keys with scores 0 and ln 3, values 0 and 4: weights 1/4 and 3/4, out = 3, LSE = ln 4. With
// dO = 2: delta = 6, ds = 1/4 (0 - 6) and 3/4 (8 - 6), dq = ds_1 k_1, dv = 2/4 and 6/4.
TEST_F(AttentionKernelGpu, AnExampleByHand) {
  Problem p({1, 1, 1, 1, 0, 1}, 1, 2, {full(0, 1, 0, 2)});
  const auto ln_3 = static_cast<float>(std::log(3.0));
  p.q.set(0, 0, 1);
  p.kv.set(0, 0, 0), p.kv.set(1, 0, ln_3);
  p.kv.set(0, 1, 0), p.kv.set(1, 1, 4);
  p.d_out.set(0, 0, 2);
  const double tolerance = attention_tolerance(1, 2, 1);
  const Forward got = forward(p);
  EXPECT_NEAR(got.out(0, 0), 3, 3 * tolerance);
  EXPECT_NEAR(got.lse(0, 0), std::log(4.0), tolerance);
  const Backward g = backward(p, got);
  EXPECT_NEAR(g.d_q(0, 0), 1.5 * std::log(3.0), 6 * tolerance);
  EXPECT_NEAR(g.d_kv(0, 0), -1.5, 6 * tolerance);
  EXPECT_NEAR(g.d_kv(1, 0), 1.5, 6 * tolerance);
  EXPECT_NEAR(g.d_kv(0, 1), 0.5, 2 * tolerance);
  EXPECT_NEAR(g.d_kv(1, 1), 1.5, 2 * tolerance);
}

TEST_F(AttentionKernelGpu, HeadDimensions) {
  for (const int64_t dim : {1, 5, 16, 40, 64, 80, 96, 128, 256})
    for (const Types types : {all_f32, all_bf16}) {
      SCOPED_TRACE(testing::Message() << dim << ' ' << name_of(types.inputs));
      check(Problem(heads_of(2, 1, dim), 70, 90, {causal(0, 70, 0, 90, 10)}, types));
    }
}

TEST_F(AttentionKernelGpu, RowsThatAreNotAligned) {
  for (const Types types : {all_f32, all_bf16})
    check(Problem(heads_of(2, 1, 32), 40, 40, {causal(0, 40, 0, 40, 0)}, types, 3));
}

TEST_F(AttentionKernelGpu, RaggedSizes) {
  for (const int64_t rows : {1, 17, 64, 65})
    for (const int64_t keys : {1, 31, 64, 130}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << keys << " keys");
      check(Problem(heads_of(1, 1, 16), rows + 3, keys + 2, {full(2, rows, 1, keys)}, bf16_in));
    }
}

TEST_F(AttentionKernelGpu, Diagonals) {
  for (const int64_t offset : {-120, -64, -17, -1, 0, 1, 63, 64, 99, 200}) {
    SCOPED_TRACE(offset);
    check(Problem(heads_of(1, 1, 16), 100, 140, {causal(0, 100, 0, 140, offset)}, bf16_in));
  }
}

TEST_F(AttentionKernelGpu, Windows) {
  for (const int64_t window : {1, 16, 40, 64, 100})
    for (const int64_t offset : {-30, 0, 150}) {
      SCOPED_TRACE(testing::Message() << "window " << window << ", offset " << offset);
      check(Problem(heads_of(1, 1, 16), 130, 200, {causal(0, 130, 0, 200, offset, window)}));
    }
}

TEST_F(AttentionKernelGpu, Strides) {
  for (const auto& [q_stride, k_stride] : {std::pair{2, 1}, {2, 2}, {1, 2}, {3, 7}})
    for (const int64_t window : {0, 5, 90}) {
      SCOPED_TRACE(testing::Message() << q_stride << ", " << k_stride << ", window " << window);
      check(Problem(heads_of(1, 1, 16), 100, 140,
                    {causal(0, 100, 0, 140, 3, window, q_stride, k_stride)}, bf16_in));
    }
}

TEST_F(AttentionKernelGpu, GroupedQueriesAndPartsOfGroups) {
  const std::vector<Rectangle> r{causal(0, 66, 0, 66, 0)};
  for (const auto& [heads, kv_heads] : {std::pair{4, 4}, {4, 2}, {4, 1}, {5, 1}}) {
    SCOPED_TRACE(testing::Message() << heads << " heads over " << kv_heads);
    check(Problem(heads_of(heads, kv_heads, 16), 66, 66, r, bf16_in));
  }
  // Heads 2 to 7 of groups of 4: the last two of the first KV head, all of the second.
  check(Problem({6, 2, 16, 4, 2, 0.25F}, 66, 66, r));
  check(Problem({5, 3, 16, 3, 2, 0.25F}, 66, 66, r, bf16_in));
  check(Problem({1, 1, 16, 8, 7, 0.25F}, 66, 66, r));
}

TEST_F(AttentionKernelGpu, DocumentsNeverMeet) {
  std::vector<Rectangle> documents;
  int64_t at = 3;
  for (const int64_t length : {5, 1, 64, 100, 2, 33}) {
    documents.push_back(causal(at, length, at, length, 0));
    at += length + 3;  // the gaps stay NaN
  }
  for (const Types types : {all_f32, all_bf16})
    check(Problem(heads_of(2, 1, 32), at, at, documents, types));
}

TEST_F(AttentionKernelGpu, SeveralRectanglesForTheSameRows) {
  const std::vector<Rectangle> r{full(0, 130, 0, 70), causal(0, 130, 150, 130, 0),
                                 full(50, 60, 80, 65), full(60, 1, 380, 20),
                                 causal(120, 10, 360, 20, -3)};
  for (const bool fixed : {false, true})
    for (const Types types : {all_f32, all_bf16}) {
      Problem p(heads_of(2, 1, 32), 130, 400, r, types);
      p.fixed_tiles = fixed;
      check(p);
    }
}

TEST_F(AttentionKernelGpu, EmptyRectanglesDoNothing) {
  check(Problem(heads_of(2, 1, 8), 20, 20,
                {full(0, 10, 0, 0), full(3, 0, 0, 20), causal(5, 10, 0, 20, -50)}));
  check(Problem(heads_of(2, 1, 8), 20, 20, {}));
}

/// Documents behind each other with gaps, each with some rectangles in keys of their own.
Problem random_problem(std::mt19937& random) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto type = [&] { return draw(0, 1) == 0 ? DType::f32 : DType::bf16; };
  BlockHeads heads;
  heads.group = draw(0, 2) == 0 ? 4 : draw(1, 2);
  heads.kv_heads = draw(1, 2);
  heads.skew = draw(0, heads.group - 1);
  heads.heads = draw(std::max<int64_t>(1, (heads.kv_heads - 1) * heads.group - heads.skew + 1),
                     heads.kv_heads * heads.group - heads.skew);
  constexpr std::array<int64_t, 6> dims{5, 16, 24, 64, 80, 128};
  heads.head_dim = dims.at(static_cast<size_t>(draw(0, 5)));
  heads.scale = 1 / std::sqrt(static_cast<float>(heads.head_dim));
  std::vector<Rectangle> rectangles;
  int64_t row = draw(0, 3), key = draw(0, 3);
  for (int64_t documents = draw(1, 3); documents > 0; --documents) {
    const int64_t length = draw(1, 90);
    for (int64_t parts = draw(1, 2); parts > 0; --parts) {
      const int64_t first = draw(0, length - 1), rows = draw(0, length - first);
      const int64_t keys = draw(0, 200);
      Rectangle r = full(row + first, rows, key, keys);
      if (draw(0, 3) > 0)
        r.mask = {draw(0, 3) > 0, draw(-50, 200), draw(1, 3), draw(1, 3),
                  draw(0, 1) * draw(1, 150)};
      rectangles.push_back(r);
      key += keys + draw(0, 3);
    }
    row += length + draw(0, 3);
  }
  std::stable_sort(rectangles.begin(), rectangles.end(),
                   [](const Rectangle& a, const Rectangle& b) { return a.q_begin < b.q_begin; });
  Problem problem(heads, row + 1, key + 1, rectangles, {type(), type(), type()}, draw(0, 8));
  problem.fixed_tiles = draw(0, 1) == 1;
  return problem;
}

TEST_F(AttentionKernelGpu, AgreesWithTheReferenceForwardAndBackward) {
  std::mt19937 random(5);
  for (int i = 0; i < 25; ++i) {
    SCOPED_TRACE(i);
    check(random_problem(random));
  }
}

TEST_F(AttentionKernelGpu, CallsForPartsOfTheKeysAreOne) {
  for (const Types types : {all_f32, bf16_in, all_bf16})
    check_in_parts({heads_of(2, 1, 32), 70, 200, {full(0, 70, 0, 200)}, types});
}

TEST_F(AttentionKernelGpu, RowsWithoutAKeyStayUntouched) {
  for (const Types types : {all_f32, all_bf16}) {
    const Problem p(heads_of(2, 1, 32), 90, 40, {causal(10, 65, 0, 40, -25)}, types);
    Forward r = forward(p);
    for (const int64_t row : {10, 34}) {
      EXPECT_EQ(r.lse(row, 1), -infinity);
      EXPECT_EQ(r.out(row, 33), 0);
    }
    EXPECT_GT(r.lse(35, 1), -infinity);
    // Row 34 sees no key; row 76 is under no rectangle, in the warp of rows that are.
    r.out.set(34, 3, 42);
    r.out.fill_row(76, 42);
    r.lse.fill_row(76, 0.5F);
    add(p, p.rectangles, r);
    EXPECT_EQ(r.out(34, 3), 42) << "a row that sees no key was written";
    EXPECT_EQ(r.out(76, 3), 42) << "a row outside was written";
    EXPECT_EQ(r.lse(76, 1), 0.5F) << "a row outside was written";
    Backward g = backward(p, r);
    g.d_q.set(34, 3, 42);
    g.d_q.fill_row(76, 42);
    add(p, p.rectangles, r, g);
    EXPECT_EQ(g.d_q(34, 3), 42) << "a row that sees no key was written";
    EXPECT_EQ(g.d_q(76, 3), 42) << "a row outside was written";
  }
}

TEST_F(AttentionKernelGpu, RowsThatSawNothingHaveNoGradientWhateverTheyHold) {
  for (const Types types : {all_f32, all_bf16})
    for (const bool fixed : {false, true}) {
      Problem p(heads_of(2, 1, 16), 100, 100, {causal(0, 100, 0, 100, -10)}, types);
      p.fixed_tiles = fixed;
      for (int64_t r = 0; r < 10; ++r) p.q.fill_row(r, nan_value), p.d_out.fill_row(r, nan_value);
      Forward of = forward(p);
      of.lse.fill_row(50, -infinity);  // also if the mask would let it see something
      p.q.fill_row(50, nan_value);
      p.d_out.fill_row(50, nan_value);
      const Backward g = backward(p, of);
      for (int64_t c = 0; c < 32; ++c) EXPECT_EQ(g.d_q(5, c), 0) << c;
      for (int64_t c = 0; c < 32; ++c) EXPECT_EQ(g.d_q(50, c), 0) << c;
      for (int64_t j = 0; j < 90; ++j) EXPECT_FALSE(std::isnan(g.d_kv(j, 0))) << j;
      for (int64_t j = 0; j < 90; ++j) EXPECT_NE(g.d_kv(j, 20), 0) << j;
      EXPECT_EQ(g.d_kv(95, 0), 0) << "a key that nobody sees";
    }
}

TEST_F(AttentionKernelGpu, UnwantedGradientsDoNotChangeTheOthers) {
  const Problem p(heads_of(4, 2, 32), 100, 120, {full(0, 100, 0, 20), causal(0, 100, 20, 100, 0)},
                  bf16_in);
  const Forward of = forward(p);
  const Backward both = backward(p, of), none = p.no_gradients();
  const Backward queries = backward(p, of, {true, false}), keys = backward(p, of, {false, true});
  EXPECT_TRUE(queries.d_q == both.d_q && queries.d_kv == none.d_kv);
  EXPECT_TRUE(keys.d_kv == both.d_kv && keys.d_q == none.d_q);
  EXPECT_FALSE(both.d_q == none.d_q || both.d_kv == none.d_kv);
}

TEST_F(AttentionKernelGpu, RepeatsBitForBit) {
  for (const Types types : {all_f32, all_bf16}) {
    const Problem p(heads_of(4, 2, 80), 100, 100, {causal(0, 100, 0, 100, 0)}, types);
    const Forward first = forward(p), second = forward(p);
    EXPECT_TRUE(first == second);
    EXPECT_TRUE(backward(p, first) == backward(p, first));
  }
}

/// [0, length) cut at some random places.
std::vector<int64_t> random_cuts(int64_t length, std::mt19937& random) {
  std::vector<int64_t> cuts{0, length};
  for (int n = 0; n < 3; ++n)
    cuts.push_back(std::uniform_int_distribution<int64_t>(0, length)(random));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

/// One rectangle whose rows or keys can be dealt to several calls.
std::vector<Problem> fixed_problems() {
  std::vector<Problem> all;
  for (const Mask& mask : {Mask{}, Mask{true, 20}, Mask{true, 90, 1, 1, 40}, Mask{true, 5, 2, 1},
                           Mask{false, 30, 1, 1, 1}})
    for (const Types types : {all_f32, Types{DType::bf16, DType::bf16, DType::f32}}) {
      Rectangle r = full(2, 150, 1, 170);
      r.mask = mask;
      Problem& p = all.emplace_back(heads_of(2, 1, 24), 155, 173, std::vector{r}, types);
      p.fixed_tiles = true;
    }
  return all;
}

TEST_F(AttentionKernelGpu, FixedTilesGiveTheSameBitsHoweverQueriesAreDealt) {
  std::mt19937 random(7);
  for (const Problem& p : fixed_problems()) {
    const Rectangle& r = p.rectangles[0];
    Forward whole = forward(p);
    add(p, p.rectangles, whole);  // merged with what was there
    Forward parts = p.cleared();
    const Backward gradients = backward(p, whole);
    Backward part_gradients = p.no_gradients();
    for (int round = 0; round < 2; ++round) {
      const std::vector<int64_t> cuts = random_cuts(r.q_length, random);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        Rectangle part = r;
        part.q_begin += cuts[i];
        part.q_length = cuts[i + 1] - cuts[i];
        part.mask.offset += r.mask.full() ? 0 : cuts[i] * r.mask.q_stride;
        add(p, {&part, 1}, parts);
        if (round == 0) add(p, {&part, 1}, whole, part_gradients, {true, false});
      }
    }
    EXPECT_TRUE(parts == whole);
    EXPECT_TRUE(part_gradients.d_q == gradients.d_q);
  }
}

TEST_F(AttentionKernelGpu, FixedTilesGiveTheSameBitsHoweverKeysAreDealt) {
  std::mt19937 random(8);
  for (const Problem& p : fixed_problems()) {
    const Rectangle& r = p.rectangles[0];
    const Forward of = forward(p);
    const Backward whole = backward(p, of);
    Backward parts = p.no_gradients();
    const std::vector<int64_t> cuts = random_cuts(r.k_length, random);
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      Rectangle part = r;
      part.k_begin += cuts[i];
      part.k_length = cuts[i + 1] - cuts[i];
      part.mask.offset -= r.mask.full() ? 0 : cuts[i] * r.mask.k_stride;
      add(p, {&part, 1}, of, parts, {false, true});
    }
    EXPECT_TRUE(parts.d_kv == whole.d_kv);
  }
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

TEST_F(AttentionKernelGpu, LargeOffsets) {
  Problem p(heads_of(2, 1, 32), 70, 120, {causal(0, 70, 0, 120, 50)});
  // Scores around 1e4: one dimension of the queries times one of the keys.
  for (int64_t r = 0; r < 120; ++r) p.kv.set(r, 0, 100);
  for (int64_t r = 0; r < 70; ++r)
    for (int64_t h = 0; h < 2; ++h) p.q.set(r, h * 32, 100 / p.heads.scale);
  p.magnified = 1e4;
  p.gradient_term = 100;
  check(p);
}

TEST_F(AttentionKernelGpu, ScoresThatKeepGrowing) {
  // Every block of keys exceeds the maximum of the ones before, or falls far below it.
  Problem p(heads_of(1, 1, 8), 40, 200, {full(0, 40, 0, 200)});
  for (int64_t r = 0; r < 200; ++r) p.kv.set(r, 3, static_cast<float>(2 * r));
  for (int64_t r = 0; r < 40; ++r) p.q.set(r, 3, r % 2 == 0 ? 1 : -1);
  p.magnified = 140;
  p.gradient_term = 400;
  check(p);
}

TEST_F(AttentionKernelGpu, NotANumberInAVisibleRowShows) {
  for (const Types types : {all_f32, all_bf16}) {
    Problem p(heads_of(1, 1, 8), 40, 40, {causal(0, 40, 0, 40, 0)}, types);
    p.q.set(7, 2, nan_value);
    p.kv.set(35, 1, nan_value);  // a key
    const Forward r = forward(p);
    EXPECT_TRUE(std::isnan(r.lse(7, 0)) && std::isnan(r.out(7, 0)));
    EXPECT_FALSE(std::isnan(r.lse(6, 0)) || std::isnan(r.out(6, 0)));
    EXPECT_FALSE(std::isnan(r.lse(34, 0)));
    EXPECT_TRUE(std::isnan(r.lse(35, 0)) && std::isnan(r.lse(39, 0)));
    const Backward g = backward(p, r);
    EXPECT_TRUE(std::isnan(g.d_q(7, 0)) && std::isnan(g.d_kv(3, 0)) && std::isnan(g.d_kv(3, 8)));
    EXPECT_TRUE(std::isnan(g.d_q(39, 0)) && std::isnan(g.d_kv(38, 0)));
  }
}

TEST_F(AttentionKernelGpu, InfiniteScoresShowAndStayInTheirRow) {
  Problem p(heads_of(1, 1, 8), 20, 20, {causal(0, 20, 0, 20, 0)});
  p.q.set(7, 2, infinity);
  const Forward r = forward(p);
  EXPECT_TRUE(std::isnan(r.lse(7, 0)));
  EXPECT_FALSE(std::isnan(r.lse(6, 0)) || std::isnan(r.lse(8, 0)));
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
    try {
      kernel().forward(block);
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ExitCode::usage);
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  ForwardBlock block;
  block.heads = heads_of(1, 1, 257);
  expect_usage(block, "head_dim 257: the CUDA attention kernel takes 1 to 256");
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

}  // namespace GYRE_FILE
}  // namespace gyre
