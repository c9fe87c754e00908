// What a row-major product asks of a column-major library, carried out here in plain loops.

#include "runtime/gemm_layout.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "core/error.hpp"
#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

/// op(x)(i, j) of a column-major matrix.
float element(const ColumnMajorGemm::Matrix& x, int64_t i, int64_t j) {
  if (x.op == Transpose::yes) std::swap(i, j);
  EXPECT_LT(i, x.rows);
  EXPECT_LT(j, x.cols);
  return reinterpret_cast<const float*>(x.data)[i + j * x.leading];
}

/// rows x cols small integers, whose products are exact, in rows of `stride`; -1e9 in the gaps.
std::vector<float> matrix(int64_t rows, int64_t cols, int64_t stride, int seed) {
  std::vector<float> x(rows * stride, -1e9F);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      x[r * stride + c] = static_cast<float>((7 * r + 3 * c + seed) % 11 - 5);
  return x;
}

void check(int64_t m, int64_t n, int64_t k, bool at, bool bt, int64_t gap) {
  SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << ", transposed " << at << bt
                                  << ", gap " << gap);
  const int64_t a_rows = at ? k : m, a_cols = at ? m : k, b_rows = bt ? n : k, b_cols = bt ? k : n;
  std::vector<float> a = matrix(a_rows, a_cols, a_cols + gap, 1);
  std::vector<float> b = matrix(b_rows, b_cols, b_cols + 2 * gap, 2);
  std::vector<float> c(m * (n + gap), 99.0F);
  const MatrixView<const float> a_view(a.data(), a_rows, a_cols, a_cols + gap);
  const MatrixView<const float> b_view(b.data(), b_rows, b_cols, b_cols + 2 * gap);
  const MatrixView<float> c_view(c.data(), m, n, n + gap);
  const ColumnMajorGemm g = column_major(a_view, at ? Transpose::yes : Transpose::no, b_view,
                                         bt ? Transpose::yes : Transpose::no, MatrixRef(c_view));
  for (const ColumnMajorGemm::Matrix& x : {g.first, g.second, g.result})
    EXPECT_GE(x.leading, std::max<int64_t>(x.rows, 1)) << "as libraries demand";
  ASSERT_EQ(g.result.data, reinterpret_cast<const std::byte*>(c.data()));
  ASSERT_EQ(g.result.rows, g.m);
  ASSERT_EQ(g.result.cols, g.n);
  for (int64_t i = 0; i < g.m; ++i)
    for (int64_t j = 0; j < g.n; ++j) {
      float sum = 0;
      for (int64_t l = 0; l < g.k; ++l) sum += element(g.first, i, l) * element(g.second, l, j);
      c[i + j * g.result.leading] = sum;
    }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float want = 0;
      for (int64_t l = 0; l < k; ++l)
        want += (at ? a_view(l, i) : a_view(i, l)) * (bt ? b_view(j, l) : b_view(l, j));
      EXPECT_EQ(c_view(i, j), want);
    }
    for (int64_t j = n; j < n + gap; ++j) EXPECT_EQ(c_view.row(i)[j], 99.0F);
  }
}

TEST(GemmLayout, ColumnMajorProductsAreTheRowMajorOnes) {
  for (const bool at : {false, true})
    for (const bool bt : {false, true})
      for (const int64_t gap : {0, 3}) {
        check(2, 5, 3, at, bt, gap);
        check(1, 4, 2, at, bt, gap);
        check(3, 1, 1, at, bt, gap);
        check(4, 2, 0, at, bt, gap);
      }
}

TEST(GemmLayout, OneRowMayHaveAnyStride) {
  std::vector<float> x(8);
  const MatrixView<float> row(x.data(), 1, 8, 0), column(x.data(), 8, 1, 1), c(x.data(), 1, 1, 0);
  const ColumnMajorGemm g = column_major(row, Transpose::no, column, Transpose::no, MatrixRef(c));
  EXPECT_EQ(g.second.leading, 8);
  EXPECT_EQ(g.result.leading, 1);
}

TEST(GemmLayout, WhatDoesNotFitIsAUsageErrorWithTheShapes) {
  std::vector<float> x(64);
  std::vector<bf16> y(64);
  const auto f32 = [&](int64_t rows, int64_t cols) { return MatrixView(x.data(), rows, cols); };
  const auto half = [&](int64_t rows, int64_t cols) { return MatrixView(y.data(), rows, cols); };
  const auto error = [](ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, ConstMatrixRef c) {
    return test::usage_message([&] { gemm_shape(a, a_op, b, Transpose::no, c); });
  };
  EXPECT_EQ(
      error(f32(2, 3), Transpose::no, f32(4, 5), f32(2, 5)),
      "no matrix product c [2, 5] f32 = a [2, 3] f32 times b [4, 5] f32: sums run over 3 of a "
      "and 4 of b");
  EXPECT_EQ(error(f32(3, 2), Transpose::yes, f32(3, 5), f32(3, 5)),
            "no matrix product c [3, 5] f32 = aᵀ, a matrix [3, 2] f32 times b [3, 5] f32: c has to "
            "be [2, 5]");
  EXPECT_NE(error(f32(2, 3), Transpose::no, half(3, 5), f32(2, 5)).find("a and b have to be"),
            std::string::npos);
  EXPECT_NE(error(f32(2, 3), Transpose::no, f32(3, 5), half(2, 5)).find("c has to be f32"),
            std::string::npos);
  MatrixView<float> overlapping = f32(2, 3);
  overlapping.stride = 2;
  EXPECT_NE(error(overlapping, Transpose::no, f32(3, 5), f32(2, 5)).find("rows of a overlap"),
            std::string::npos);
  EXPECT_EQ(gemm_shape(half(2, 3), Transpose::no, half(3, 5), Transpose::no, f32(2, 5)).k, 3);
  EXPECT_EQ(gemm_shape(half(2, 3), Transpose::no, half(3, 5), Transpose::no, half(2, 5)).n, 5);
}

TEST(GemmLayout, Alignment) {
  alignas(256) static std::byte memory[512];
  EXPECT_EQ(alignment_of(memory), 256);
  EXPECT_EQ(alignment_of(memory + 4), 4);
  EXPECT_EQ(alignment_of(memory + 96), 32);
  EXPECT_EQ(alignment_of(memory + 3), 1);
}

}  // namespace GYRE_FILE
}  // namespace gyre
