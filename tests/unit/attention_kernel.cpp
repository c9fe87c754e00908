#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "close.hpp"
#include "runtime/buffer.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace {

using test::rounding;
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

Rectangle full(int64_t q, int64_t rows, int64_t k, int64_t keys) {
  return {LocalToken(q), rows, LocalToken(k), keys, {}};
}
Rectangle causal(int64_t q, int64_t rows, int64_t k, int64_t keys, int64_t diagonal) {
  return {LocalToken(q), rows, LocalToken(k), keys, {true, diagonal}};
}

struct Result {
  Result(int64_t rows, const HeadShape& shape)
      : out(rows * (shape.heads * shape.head_dim + 2)), lse(rows * (shape.heads + 1)) {
    const int64_t width = shape.heads * shape.head_dim;
    state.out = {out.data(), rows, width, width + 2};
    state.lse = {lse.data(), rows, shape.heads, shape.heads + 1};
  }
  Buffer<float> out, lse;
  AttentionState state;
};

/// Random queries and keys with gaps between rows; everything that no rectangle covers is NaN.
struct Problem {
  Problem(HeadShape shape_, int64_t query_rows, int64_t key_rows,
          std::vector<Rectangle> rectangles_)
      : shape(shape_),
        rectangles(std::move(rectangles_)),
        queries(query_rows, shape.heads * shape.head_dim),
        keys(key_rows, shape.kv_heads * shape.head_dim),
        values(key_rows, shape.kv_heads * shape.head_dim) {
    shape.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
    std::mt19937 random(31);
    for (const Rectangle& r : rectangles) {
      queries.fill(r.q_begin.value(), r.q_length, random);
      keys.fill(r.k_begin.value(), r.k_length, random);
      values.fill(r.k_begin.value(), r.k_length, random);
    }
  }

  struct Rows {
    Rows(int64_t rows, int64_t width)
        : storage(rows * (width + 5)), view(storage.data(), rows, width, width + 5) {
      std::fill_n(storage.data(), storage.size(), nan);
    }
    void fill(int64_t begin, int64_t count, std::mt19937& random) {
      for (int64_t r = begin; r < begin + count; ++r)
        if (std::isnan(view(r, 0)))
          test::fill_normal({view.row(r), static_cast<size_t>(view.cols)}, random);
    }
    Buffer<float> storage;
    MatrixView<float> view;
  };

  Result run(BlockKernel& kernel, std::span<const Rectangle> some) const {
    const bool old = poison_new_buffers(true);
    Result result(queries.view.rows, shape);
    poison_new_buffers(old);
    kernel.reset(result.state);
    add(kernel, some, result);
    return result;
  }
  void add(BlockKernel& kernel, std::span<const Rectangle> some, Result& result) const {
    kernel.forward(shape, queries.view, {keys.view, values.view}, some, result.state, {});
  }

  HeadShape shape;
  std::vector<Rectangle> rectangles;
  Rows queries, keys, values;
};

/// Largest |value| of the rows in use.
double largest(const Problem::Rows& rows) {
  double most = 0;
  for (const float x : rows.storage.span())
    if (!std::isnan(x)) most = std::max(most, std::abs(static_cast<double>(x)));
  return most;
}

/// Errors of a score are rounding(head_dim) · Σ|q·k|·scale, bounded here by the norms; they change
/// weights relatively, hence O by that share of max|v|, and LSE by that amount.
double score_error(const Problem& p) {
  const auto dim = static_cast<double>(p.shape.head_dim);
  const double size =
      largest(p.queries) * largest(p.keys) * dim * static_cast<double>(p.shape.scale);
  return rounding(dim) * std::max(1.0, size / 4);
}

void expect_same(const Problem& p, const Result& got, const Result& want) {
  const double weights = score_error(p) + rounding(static_cast<double>(p.keys.view.rows));
  const double out_tolerance = 2 * weights * largest(p.values);
  for (int64_t r = 0; r < p.queries.view.rows; ++r) {
    SCOPED_TRACE(testing::Message() << "row " << r);
    const auto row_of = [r](MatrixView<float> m) {
      return std::span<const float>(m.row(r), static_cast<size_t>(m.cols));
    };
    test::expect_close(row_of(got.state.out), row_of(want.state.out),
                       [&](size_t) { return out_tolerance; });
    test::expect_close(row_of(got.state.lse), row_of(want.state.lse), [&](size_t h) {
      const double lse = want.state.lse(r, static_cast<int64_t>(h));
      return weights + rounding(1) * std::abs(lse);
    });
    if (testing::Test::HasFailure()) return;
  }
}

void check(const Problem& p) {
  const auto cpu = make_cpu_kernel(), reference = make_reference_kernel();
  expect_same(p, p.run(*cpu, p.rectangles), p.run(*reference, p.rectangles));
}

TEST(AttentionKernel, ResetMakesTheIdentity) {
  const Problem p({3, 3, 8}, 10, 10, {});
  const auto cpu = make_cpu_kernel();
  const Result r = p.run(*cpu, {});
  for (int64_t row = 0; row < 10; ++row) {
    for (int64_t c = 0; c < 24; ++c) EXPECT_EQ(r.state.out(row, c), 0.0F);
    for (int64_t h = 0; h < 3; ++h) EXPECT_EQ(r.state.lse(row, h), -infinity);
    EXPECT_TRUE(std::isnan(r.out[row * 26 + 24])) << "wrote behind the row";
  }
}

TEST(AttentionKernel, HeadDimensions) {
  for (const int64_t dim : {1, 4, 8, 13, 24, 32, 64, 80, 128}) {
    SCOPED_TRACE(dim);
    check(Problem({4, 2, dim}, 150, 150, {causal(0, 150, 0, 150, 0)}));
  }
}

TEST(AttentionKernel, GroupedQueries) {
  for (const auto& [heads, kv_heads] :
       {std::pair{4, 4}, {4, 2}, {4, 1}, {6, 2}, {5, 1}, {7, 1}, {96, 1}}) {
    SCOPED_TRACE(testing::Message() << heads << " heads over " << kv_heads);
    check(Problem({heads, kv_heads, 16}, 70, 70, {causal(0, 70, 0, 70, 0)}));
  }
}

TEST(AttentionKernel, RaggedSizes) {
  for (const int64_t rows : {1, 2, 15, 16, 17, 63, 64, 65, 129})
    for (const int64_t keys : {1, 3, 16, 31, 64, 65, 130}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << keys << " keys");
      check(Problem({2, 1, 24}, rows + 3, keys + 2, {full(2, rows, 1, keys)}));
    }
}

TEST(AttentionKernel, Diagonals) {
  for (const int64_t diagonal :
       {-200, -100, -65, -64, -17, -1, 0, 1, 15, 16, 40, 63, 64, 99, 128, 300})
    for (const int64_t heads : {1, 3}) {
      SCOPED_TRACE(testing::Message() << "diagonal " << diagonal << ", heads " << heads);
      check(Problem({heads, 1, 16}, 100, 140, {causal(0, 100, 0, 140, diagonal)}));
    }
}

TEST(AttentionKernel, RowsWithoutAKeyStayUntouched) {
  const Problem p({2, 1, 32}, 90, 40, {causal(10, 70, 0, 40, -25)});
  const auto cpu = make_cpu_kernel();
  Result r = p.run(*cpu, p.rectangles);
  for (const int64_t row : {0, 10, 34, 80}) {
    EXPECT_EQ(r.state.lse(row, 1), -infinity);
    EXPECT_EQ(r.state.out(row, 33), 0.0F);
  }
  EXPECT_GT(r.state.lse(35, 1), -infinity);
  r.state.out(34, 3) = 42;
  p.add(*cpu, p.rectangles, r);
  EXPECT_EQ(r.state.out(34, 3), 42) << "a row that sees no key was written";
}

TEST(AttentionKernel, DocumentsNeverMeet) {
  std::vector<Rectangle> documents;
  int64_t at = 3;
  for (const int64_t length : {5, 1, 64, 100, 2, 33}) {
    documents.push_back(causal(at, length, at, length, 0));
    at += length + 3;  // the gaps stay NaN
  }
  check(Problem({4, 2, 32}, at, at, documents));
}

TEST(AttentionKernel, ManyTinyDocuments) {
  std::vector<Rectangle> documents;
  for (int64_t i = 0; i < 100; ++i) documents.push_back(causal(3 * i, 3, 3 * i, 3, 0));
  check(Problem({2, 2, 16}, 300, 300, documents));
}

TEST(AttentionKernel, SeveralRectanglesForTheSameRows) {
  check(Problem({2, 1, 32}, 200, 400,
                {full(0, 200, 0, 70), causal(0, 200, 150, 200, 0), full(50, 100, 80, 65),
                 full(60, 1, 380, 20), causal(120, 80, 360, 20, -10)}));
}

TEST(AttentionKernel, EmptyRectanglesDoNothing) {
  check(Problem({2, 1, 8}, 20, 20,
                {full(0, 10, 0, 0), full(3, 0, 0, 20), causal(5, 10, 0, 20, -50)}));
}

TEST(AttentionKernel, EveryInstructionSet) {
  test::on_every_simd_target([] {
    check(Problem({6, 2, 30}, 100, 120, {full(0, 100, 0, 20), causal(0, 100, 20, 100, 0)}));
    check(Problem({2, 1, 8}, 20, 20, {causal(0, 20, 0, 20, -5)}));
  });
}

TEST(AttentionKernel, BlockByBlockEqualsOnePass) {
  const Problem p({4, 2, 64}, 130, 300, {full(0, 130, 0, 300)});
  const auto cpu = make_cpu_kernel();
  const Result whole = p.run(*cpu, p.rectangles);
  Result parts = p.run(*cpu, {});
  for (const auto& [begin, keys] : {std::pair{200, 100}, {0, 1}, {1, 64}, {65, 135}}) {
    const Rectangle part = full(0, 130, begin, keys);
    p.add(*cpu, {&part, 1}, parts);
  }
  expect_same(p, parts, whole);
}

TEST(AttentionKernel, LargeOffsets) {
  Problem p({2, 1, 32}, 100, 200, {causal(0, 100, 0, 200, 50)});
  // Scores around 1e4: one dimension of the queries times one of the keys.
  for (int64_t r = 0; r < 200; ++r) p.keys.view(r, 0) = 100;
  for (int64_t r = 0; r < 100; ++r)
    for (int64_t h = 0; h < 2; ++h) p.queries.view(r, h * 32) = 100 / p.shape.scale;
  check(p);
}

TEST(AttentionKernel, ScoresThatKeepGrowing) {
  // Every block of keys exceeds the maximum of the ones before.
  Problem p({1, 1, 8}, 70, 300, {full(0, 70, 0, 300)});
  for (int64_t r = 0; r < 300; ++r) p.keys.view(r, 3) = static_cast<float>(r) / 4;
  for (int64_t r = 0; r < 70; ++r) p.queries.view(r, 3) = 1;
  check(p);
  for (int64_t r = 0; r < 70; ++r) p.queries.view(r, 3) = -1;  // or falls far below it
  check(p);
}

TEST(AttentionKernel, NotANumberIsNotHidden) {
  Problem p({1, 1, 8}, 20, 20, {full(0, 20, 0, 20)});
  p.queries.view(7, 2) = nan;
  const auto cpu = make_cpu_kernel();
  const Result r = p.run(*cpu, p.rectangles);
  EXPECT_TRUE(std::isnan(r.state.lse(7, 0)));
  EXPECT_TRUE(std::isnan(r.state.out(7, 0)));
  EXPECT_FALSE(std::isnan(r.state.lse(6, 0)));
}

TEST(AttentionKernel, RepeatsBitForBit) {
  const Problem p({4, 2, 32}, 200, 200, {causal(0, 200, 0, 200, 0)});
  const auto cpu = make_cpu_kernel(), other = make_cpu_kernel();
  const Result first = p.run(*cpu, p.rectangles), second = p.run(*cpu, p.rectangles);
  const Result third = p.run(*other, p.rectangles);
  const auto bytes = static_cast<size_t>(first.out.size()) * sizeof(float);
  EXPECT_EQ(0, std::memcmp(first.out.data(), second.out.data(), bytes));
  EXPECT_EQ(0, std::memcmp(first.out.data(), third.out.data(), bytes));
}

TEST(AttentionKernel, OneKernelServesDifferentShapes) {
  const auto cpu = make_cpu_kernel(), reference = make_reference_kernel();
  for (const int64_t dim : {32, 64, 8, 32}) {
    const Problem p({2, 1, dim}, 80, 90, {causal(0, 80, 0, 90, 3)});
    expect_same(p, p.run(*cpu, p.rectangles), p.run(*reference, p.rectangles));
  }
}

TEST(AttentionKernel, CallsProgressBetweenTiles) {
  const Problem p({2, 2, 64}, 1024, 1024, {causal(0, 1024, 0, 1024, 0)});
  const auto cpu = make_cpu_kernel();
  Result r = p.run(*cpu, {});
  int calls = 0;
  cpu->forward(p.shape, p.queries.view, {p.keys.view, p.values.view}, p.rectangles, r.state,
               [&] { ++calls; });
  EXPECT_GT(calls, 20);
}

}  // namespace
}  // namespace gyre
