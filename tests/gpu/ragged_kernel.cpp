// Attention by a library over ragged batches against the double-precision reference. Outputs of
// rows that no rectangle covers are NaN and have to stay so; inputs there are numbers, except where
// a test says otherwise.

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ragged_kernel_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test::ragged_kernel;

INSTANTIATE_TEST_SUITE_P(Library, RaggedKernelGpu, testing::ValuesIn(libraries()),
                         [](const auto& library) { return library.param; });

TEST_P(RaggedKernelGpu, FullMasks) {
  for (const int64_t keys : around_tiles) {
    SCOPED_TRACE(keys);
    Lengths lengths;  // 3 entries of a batch of 4
    for (const int64_t rows : around_tiles) lengths.add(rows, keys);
    check_library(lengths.problem(heads_of(2, 1, head_dim())));
  }
}

TEST_P(RaggedKernelGpu, CausalSquares) {
  Lengths lengths;
  for (const int64_t length : around_tiles) lengths.add(length, length, {true, 0});
  for (const Types types : {bf16_in, all_bf16})
    check_library(lengths.problem(heads_of(2, 1, head_dim()), types));
}

TEST_P(RaggedKernelGpu, CausalEnds) {
  for (const int64_t more : {1, 64, 127}) {
    SCOPED_TRACE(more);
    Lengths lengths;
    for (const int64_t length : around_tiles)
      lengths.add(length, length + more, {true, more});  // of the last query: all keys
    check_library(lengths.problem(heads_of(2, 1, head_dim())));
  }
}

TEST_P(RaggedKernelGpu, DiagonalsThatBeginOrEndInside) {
  // Queries that see nothing, a diagonal, and queries that see all: up to two entries for each.
  for (const int64_t offset : {-120, -64, -17, 0, 63, 99, 200}) {
    SCOPED_TRACE(offset);
    check_library(problem(heads_of(2, 1, head_dim()), 200, 140, {causal(3, 190, 2, 130, offset)}));
  }
}

TEST_P(RaggedKernelGpu, CausalWindows) {
  for (const int64_t window : {1, 30, 64, 100}) {
    SCOPED_TRACE(window);
    Lengths squares, ends;
    for (const int64_t length : around_tiles) {
      squares.add(length, length, {true, 0, 1, 1, window});
      ends.add(length, length + 70, {true, 70, 1, 1, window});
    }
    for (const Lengths& lengths : {squares, ends})
      check_library(lengths.problem(heads_of(2, 1, head_dim())));
  }
}

TEST_P(RaggedKernelGpu, WhatIsBehindTheDiagonalOfAWindowIsTheTiledKernels) {
  check(problem(heads_of(2, 1, head_dim()), 200, 140, {causal(0, 200, 0, 140, 0, 90)}));
  const std::string note = remarks();
  EXPECT_EQ(note.substr(0, note.find(';')), "tiled kernel for 2 of 4 rectangles (window)");
}

/// Query i sees keys from i - shift on.
Rectangle inverse(int64_t q, int64_t q_length, int64_t k, int64_t k_length, int64_t shift) {
  return {q, q_length, k, k_length, {false, 0, 1, 1, shift + 1}};
}

TEST_P(RaggedKernelGpu, InverseRectanglesAreCausalOnReversedRows) {
  const std::vector<Rectangle> alone = {inverse(3, 600, 2, 600, 0)};
  const std::vector<Rectangle> several = {
      inverse(3, 600, 2, 620, 20), causal(603, 40, 0, 50, 10),
      inverse(650, 520, 300, 600, 70),    // keys of the first
      inverse(1175, 515, 1000, 513, 0)};  // the last two queries see no key
  check_library(problem(heads_of(2, 2, head_dim()), 610, 610, alone, all_bf16));
  check_library(problem(heads_of(2, 1, head_dim()), 1700, 1530, several, bf16_in, false));
  const std::string note = kernel().note();
  EXPECT_NE(note.find("rows of 8 rectangles are reversed"), std::string::npos) << note;
}

TEST_P(RaggedKernelGpu, WhatIsBehindTheDiagonalOfALongWindowIsReversed) {
  check_library(problem(heads_of(2, 1, head_dim()), 1150, 600, {causal(5, 1140, 0, 600, 0, 590)}));
}

TEST_P(RaggedKernelGpu, OneEntryFarBehindTheBegin) {
  for (const int64_t offset : {0, 100}) {
    SCOPED_TRACE(offset);
    check_library(problem(heads_of(2, 1, head_dim()), 50310, 20410,
                          {causal(50000, 300, 20000, 300 + offset, offset)}));
  }
}

TEST_P(RaggedKernelGpu, ValuesOfAnotherWidth) {
  const int64_t h = head_dim();
  for (const auto& [dim, v_dim] :
       is_plain() ? std::vector<std::pair<int64_t, int64_t>>{{h, 2 * h}, {2 * h, h}}
                  : std::vector<std::pair<int64_t, int64_t>>{{192, 128}})
    for (const int64_t kv_heads : {1, 2}) {
      const BlockHeads heads = heads_of(2, kv_heads, dim, v_dim);
      SCOPED_TRACE(testing::Message() << dim << ", values " << v_dim << ", heads: " << kv_heads);
      Lengths lengths;
      for (int i = 0; i < 3; ++i) lengths.add(70, 100, {true, 30});
      for (const Types types : {bf16_in, all_bf16}) check_library(lengths.problem(heads, types));
      check_library(problem(heads, 1150, 600, {causal(5, 1140, 0, 600, 0, 590)}));  // and inverse
    }
}

TEST_P(RaggedKernelGpu, EvenBatches) {
  const int64_t length = is_plain() ? 70 : 600;
  for (const int64_t more : {0, 30})
    for (const int64_t kv_heads : {1, 2}) {
      SCOPED_TRACE(testing::Message() << more << " keys more, heads: " << kv_heads);
      Lengths lengths;
      for (int i = 0; i < 3; ++i) lengths.add(length, length + more, {true, more});
      lengths.add(length + 1, length - 1);
      check_library(lengths.problem(heads_of(2, kv_heads, head_dim())));
    }
  if (!is_plain()) return;
  EXPECT_EQ(plain().forward.even, GetParam() == "even" ? plain().forward.executed : 0);
  EXPECT_EQ(plain().backward.even, GetParam() == "even" ? plain().backward.executed : 0);
}

TEST_P(RaggedKernelGpu, KeysThatDescendAndOverlap) {
  // The last rectangle is not the one that ends last, and keys are shared by up to three.
  check_library(problem(heads_of(2, 1, head_dim()), 300, 420,
                        {full(0, 64, 260, 150), full(64, 70, 200, 129), full(134, 65, 130, 140),
                         full(199, 100, 5, 200)}));
}

TEST_P(RaggedKernelGpu, Staircases) {
  for (const int64_t length : {40, 65}) {
    std::vector<Rectangle> steps;
    for (int64_t begin = 0; begin < 7 * length; begin += length)
      steps.push_back({begin, length, 0, begin + length, {}});
    check_library(problem(heads_of(2, 1, head_dim()), 7 * length, 7 * length, steps));
  }
}

TEST_P(RaggedKernelGpu, SeveralRectanglesForTheSameRows) {
  check_library(problem(heads_of(2, 1, head_dim()), 130, 400,
                        {full(0, 130, 0, 70), causal(0, 130, 150, 130, 0), full(50, 60, 80, 65),
                         full(60, 1, 380, 20), causal(120, 10, 360, 20, -3)}));
}

TEST_P(RaggedKernelGpu, ScoresFarBelowZero) {
  // Tiles of keys are longer than 64, and 192 is one and a half. All scores are near -100: a key
  // that is not there, with a score of 0, would weigh exp(90), which is infinite in f32.
  for (const int64_t keys : {64, 192}) {
    SCOPED_TRACE(keys);
    Problem p = problem(heads_of(2, 1, 64), 70, keys, {full(0, 70, 0, keys)});
    constexpr float shift = 3.5F, spread = 0.25F;
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < p.q.cols(); ++c) p.q.set(r, c, shift + spread * p.q(r, c));
    for (int64_t r = 0; r < p.keys; ++r)
      for (int64_t c = 0; c < p.k_width(); ++c) p.kv.set(r, c, -shift + spread * p.kv(r, c));
    p.magnified = 100;
    p.gradient_term = shift;
    EXPECT_LT(reference_forward(p).lse(0, 0), -std::log(std::numeric_limits<float>::max()));
    check_library(p);
  }
}

TEST_P(RaggedKernelGpu, GroupedQueries) {
  Lengths lengths;
  for (const int64_t length : {65, 129}) lengths.add(length, length, {true, 0});
  for (const auto& [heads, kv_heads] : {std::pair{4, 4}, {4, 2}, {6, 2}, {5, 1}}) {
    SCOPED_TRACE(testing::Message() << heads << " heads over " << kv_heads);
    check_library(lengths.problem(heads_of(heads, kv_heads, head_dim())));
  }
  check_library(lengths.problem({3, 1, head_dim(), 8, 5, 0.25F}));  // the last heads of a group
}

TEST_P(RaggedKernelGpu, HeadDimensions) {
  Lengths lengths;
  for (const int64_t length : {65, 129}) lengths.add(length, length + 64, {true, 64});
  const std::vector<int64_t> dims =
      is_plain() ? std::vector<int64_t>{32, 80} : std::vector<int64_t>{64, 96, 128};
  for (const int64_t dim : dims) {
    SCOPED_TRACE(dim);
    check_library(lengths.problem(heads_of(2, 1, dim)));
  }
}

TEST_P(RaggedKernelGpu, NotANumberInRowsOutsideDoesNotMatter) {
  Lengths whole, squares, ends;
  for (const int64_t length : around_tiles) {
    whole.add(length, length);
    squares.add(length, length, {true, 0});
    ends.add(length, length + 64, {true, 64});
  }
  for (const Lengths& lengths : {whole, squares, ends})
    check_library(lengths.problem(heads_of(2, 1, head_dim()), bf16_in, false));
}

TEST_P(RaggedKernelGpu, CallsForPartsOfTheKeysAreOne) {
  for (const Types types : {bf16_in, all_bf16}) {
    check_in_parts(problem(heads_of(2, 1, head_dim()), 70, 200, {full(0, 70, 0, 200)}, types));
    if (has_gradients()) expect_library();
  }
}

TEST_P(RaggedKernelGpu, NarrowArraysAreSaidToBeRoundedTo) {
  for (const DType type : {DType::bf16, DType::f32}) {
    const KernelPrecision precision = kernel().precision(type);
    EXPECT_EQ(precision.narrow_weights, type == DType::bf16);
    EXPECT_EQ(precision.narrow_results, type == DType::bf16);
  }
}

TEST_P(RaggedKernelGpu, SeveralBatchesOfACall) {
  // Three masks; entries of up to 512 queries and of more.
  Lengths lengths;
  for (const int64_t rows : {65, 513}) {
    lengths.add(rows, 20);
    lengths.add(rows, rows, {true, 0});
    lengths.add(rows, rows + 7, {true, 7});
  }
  Problem p = lengths.problem(heads_of(1, 1, head_dim()), all_bf16);
  p.narrow_partials = false;  // one for each row, no more than is rounded anyway
  check_library(p);
  EXPECT_TRUE(!is_plain() || (plain().forward.executed == 6 && plain().backward.executed == 6));
}

TEST_P(RaggedKernelGpu, MoreRowsThanABatchTakes) {
  std::vector<Rectangle> parts;  // 900 · 20 keys are more than 16384
  for (int64_t i = 0; i < 900; ++i) parts.push_back(full(i, 1, i % 30, 20));
  check_library(problem(heads_of(1, 1, head_dim()), 900, 50, parts));
  EXPECT_TRUE(!is_plain() || (plain().forward.executed == 2 && plain().backward.executed == 2));
}

TEST_P(RaggedKernelGpu, MoreEntriesThanABatchTakes) {
  std::vector<Rectangle> rows;
  for (int64_t i = 0; i < 1030; ++i) rows.push_back(full(i, 1, 1029 - i, 1));
  Problem p = problem(heads_of(1, 1, head_dim()), 1030, 1030, rows);
  p.narrow_partials = false;
  check_library(p);
  EXPECT_TRUE(!is_plain() || (plain().forward.executed == 2 && plain().backward.executed == 2));
}

TEST_P(RaggedKernelGpu, TheSameBitsInEveryRun) {
  // Rows of queries, and of keys, that three entries share.
  const Problem p = problem(heads_of(2, 1, head_dim()), 70, 110,
                            {full(0, 70, 0, 30), full(0, 60, 30, 50), full(0, 50, 80, 30),
                             full(50, 20, 80, 30), full(60, 10, 40, 30)},
                            all_bf16);
  const Forward first = forward(p);
  const Backward gradients = backward(p, first);
  if (!remarks().empty()) GTEST_SKIP() << remarks();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(forward(p), first);
    EXPECT_EQ(backward(p, first), gradients);
  }
}

TEST_P(RaggedKernelGpu, GradientsThatAreNotWantedStay) {
  const Problem p =
      problem(heads_of(2, 1, head_dim()), 40, 90, {full(0, 40, 0, 50), causal(3, 37, 50, 40, 3)});
  const Forward of = reference_forward(p);
  const Backward all = reference_backward(p, of), none = p.no_gradients();
  EXPECT_LE(worst_error(p, backward(p, of, {true, false}), {all.d_q, none.d_kv}), 1);
  EXPECT_LE(worst_error(p, backward(p, of, {false, true}), {none.d_q, all.d_kv}), 1);
  EXPECT_EQ(backward(p, of, {false, false}), none);
}

TEST_P(RaggedKernelGpu, RowsThatSawNothingHaveNoGradient) {
  const Problem p = problem(heads_of(2, 1, head_dim()), 20, 30, {full(0, 20, 0, 30)});
  Forward of = reference_forward(p);
  for (const int64_t row : {0, 7, 19}) of.lse.fill_row(row, -infinity);
  of.lse.set(11, 1, -infinity);
  const Backward want = reference_backward(p, of);
  EXPECT_EQ(want.d_q(7, 0), 0);
  EXPECT_LE(worst_error(p, backward(p, of), want), 1);
}

TEST_P(RaggedKernelGpu, NoRectanglesAndRectanglesWithoutAPair) {
  Problem p = problem(heads_of(2, 1, head_dim()), 10, 10, {full(0, 10, 0, 10)});
  p.rectangles = {causal(0, 5, 0, 10, -5), full(5, 5, 3, 0)};
  check_library(p);
  p.rectangles.clear();
  check_library(p);
  EXPECT_EQ(remarks(), "");
}

}  // namespace GYRE_FILE
}  // namespace gyre
