#include "runtime/gemm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "close.hpp"
#include "runtime/buffer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::rounding;

enum class Variant { plain, a_transposed, b_transposed };
constexpr std::array variants = {Variant::plain, Variant::a_transposed, Variant::b_transposed};

/// A matrix inside a larger array that is NaN everywhere else.
struct Padded {
  Padded(int64_t rows, int64_t cols, int64_t extra)
      : storage(std::max<int64_t>(rows, 1) * (cols + extra)),
        view(storage.data(), rows, cols, cols + extra) {
    std::fill_n(storage.data(), storage.size(), std::numeric_limits<float>::quiet_NaN());
  }
  void fill(std::mt19937& random) {
    for (int64_t r = 0; r < view.rows; ++r)
      test::fill_normal({view.row(r), static_cast<size_t>(view.cols)}, random);
  }
  Buffer<float> storage;
  MatrixView<float> view;
};

Padded transposed(const Padded& from, int64_t extra) {
  Padded to(from.view.cols, from.view.rows, extra);
  for (int64_t r = 0; r < from.view.rows; ++r)
    for (int64_t c = 0; c < from.view.cols; ++c) to.view(c, r) = from.view(r, c);
  return to;
}

/// As bf16, with the same gap behind each row.
std::vector<bf16> narrowed(const Padded& from) {
  std::vector<bf16> to;
  for (const float x : from.storage.span()) to.push_back(to_bf16(x));
  return to;
}

/// One of the variants of c = a · b, from the operands as they are not transposed.
void multiply(Variant variant, const Padded& a, const Padded& b, int64_t extra, bool narrow,
              MatrixView<float> c, bool accumulate) {
  const Padded at = transposed(a, extra), bt = transposed(b, extra);
  const Padded& used_b = variant == Variant::b_transposed ? bt : b;
  std::vector<bf16> halves = narrowed(used_b);
  const MatrixView<float> v = used_b.view;
  const ConstMatrixRef b_ref =
      narrow ? ConstMatrixRef(MatrixView<bf16>(halves.data(), v.rows, v.cols, v.stride))
             : ConstMatrixRef(v);
  if (variant == Variant::plain) gemm(a.view, b_ref, c, accumulate);
  if (variant == Variant::a_transposed) gemm_a_transposed(at.view, b_ref, c, accumulate);
  if (variant == Variant::b_transposed) gemm_b_transposed(a.view, b_ref, c, accumulate);
}

void check(int64_t m, int64_t n, int64_t k, int64_t extra, bool accumulate,
           Variant variant = Variant::plain, bool narrow = false) {
  SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << ", stride + " << extra
                                  << (accumulate ? ", accumulating" : "") << ", variant "
                                  << static_cast<int>(variant) << (narrow ? ", bf16" : ""));
  std::mt19937 random(7);
  Padded a(m, k, extra), b(k, n, 2 * extra), c(m, n, extra), want(m, n, 0), size(m, n, 0);
  a.fill(random);
  b.fill(random);
  if (narrow)
    for (float& x : b.storage.span()) x = to_float(to_bf16(x));
  if (accumulate) c.fill(random);
  for (int64_t i = 0; i < m; ++i) {
    std::copy_n(c.view.row(i), n, want.view.row(i));
    for (int64_t j = 0; j < n; ++j) {
      float sum = accumulate ? std::abs(c.view(i, j)) : 0.0F;
      for (int64_t l = 0; l < k; ++l) sum += std::abs(a.view(i, l) * b.view(l, j));
      size.view(i, j) = sum;
    }
  }
  multiply(variant, a, b, extra, narrow, c.view, accumulate);
  gemm_reference(a.view, b.view, want.view, accumulate);
  for (int64_t i = 0; i < m; ++i) {
    const std::span<const float> expected(want.view.row(i), static_cast<size_t>(n));
    test::expect_close({c.view.row(i), static_cast<size_t>(n)}, expected, [&](size_t j) {
      return rounding(static_cast<double>(k)) *
             static_cast<double>(size.view(i, static_cast<int64_t>(j)));
    });
    for (int64_t j = n; j < n + extra; ++j)
      ASSERT_TRUE(std::isnan(c.storage[i * c.view.stride + j])) << "wrote behind row " << i;
  }
}

TEST(Gemm, MatchesReferenceForAllRemainders) {
  for (const int64_t m : {1, 2, 63, 64, 65, 200})
    for (const int64_t n : {1, 15, 64, 65, 192})
      for (const int64_t k : {1, 3, 64, 257}) check(m, n, k, 0, false);
}

TEST(Gemm, TransposedOperandsAndBf16MatchReferenceForAllRemainders) {
  for (const Variant variant : variants)
    for (const bool narrow : {false, true}) {
      if (variant == Variant::plain && !narrow) continue;
      for (const int64_t m : {1, 63, 64, 130})
        for (const int64_t n : {1, 15, 65, 192})
          for (const int64_t k : {1, 17, 257}) check(m, n, k, 0, false, variant, narrow);
    }
}

TEST(Gemm, HonoursStrides) {
  for (const int64_t m : {1, 7, 130}) check(m, 77, 33, 5, false);
  check(129, 65, 300, 3, true);
  for (const Variant variant : variants)
    for (const bool narrow : {false, true}) {
      check(1, 77, 33, 5, true, variant, narrow);
      check(130, 1, 65, 3, true, variant, narrow);
      check(70, 65, 300, 3, false, variant, narrow);
    }
}

TEST(Gemm, Accumulates) {
  check(64, 64, 512, 0, true);
  check(3, 10, 600, 0, true);
}

TEST(Gemm, EmptyShapes) {
  for (const auto& [m, n, k] : {std::array{0, 5, 4}, {5, 0, 4}, {5, 4, 0}, {0, 0, 0}}) {
    for (const Variant variant : variants) {
      check(m, n, k, 1, false, variant);
      check(m, n, k, 1, true, variant);
    }
  }
}

TEST(Gemm, RepeatsBitForBit) {
  std::mt19937 random(3);
  Padded a(150, 300, 1), b(300, 100, 1), first(150, 100, 0), second(150, 100, 0);
  a.fill(random);
  b.fill(random);
  gemm(a.view, b.view, first.view);
  gemm(a.view, b.view, second.view);
  EXPECT_EQ(0, std::memcmp(first.storage.data(), second.storage.data(), 150 * 100 * sizeof(float)));
}

TEST(Gemm, PanelsOfColumnsGiveTheSameBitsAsAllOfThem) {
  std::mt19937 random(3);
  const int64_t m = 100, n = 3 * gemm_panel_columns + 5, k = 300;
  Padded a(m, k, 1), b(k, n, 1), whole(m, n, 0), parts(m, n, 0);
  a.fill(random);
  b.fill(random);
  const Padded at = transposed(a, 0), bt = transposed(b, 0);
  for (const Variant variant : variants) {
    multiply(variant, a, b, 0, false, whole.view, false);
    for (int64_t at_column = 0; at_column < n; at_column += 2 * gemm_panel_columns) {
      const int64_t count = std::min(2 * gemm_panel_columns, n - at_column);
      const MatrixView<float> c = parts.view.columns_from(at_column, count);
      if (variant == Variant::plain) gemm(a.view, b.view.columns_from(at_column, count), c);
      if (variant == Variant::a_transposed)
        gemm_a_transposed(at.view, b.view.columns_from(at_column, count), c);
      if (variant == Variant::b_transposed)
        gemm_b_transposed(a.view, bt.view.rows_from(at_column, count), c);
    }
    EXPECT_EQ(0, std::memcmp(whole.storage.data(), parts.storage.data(),
                             static_cast<size_t>(m * n) * sizeof(float)));
  }
}

TEST(GemmDouble, IsTheSumOfProductsWhateverTheShape) {
  std::mt19937 random(7);
  for (const auto& [m, k, n] : {std::array<int64_t, 3>{1, 1, 1},
                                {3, 300, 70},
                                {130, 64, 129},
                                {65, 257, 5},
                                {2, 0, 3},
                                {0, 4, 4}}) {
    std::vector<double> a(static_cast<size_t>(m * k)), c(static_cast<size_t>(m * n), 0);
    std::vector<float> b(static_cast<size_t>(k * n));
    std::normal_distribution<double> normal;
    for (double& x : a) x = normal(random);
    for (float& x : b) x = static_cast<float>(normal(random));
    gemm(MatrixView<const double>(a.data(), m, k), MatrixView<const float>(b.data(), k, n),
         MatrixView<double>(c.data(), m, n));
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double want = 0;
        for (int64_t l = 0; l < k; ++l)
          want += a[static_cast<size_t>(i * k + l)] *
                  static_cast<double>(b[static_cast<size_t>(l * n + j)]);
        ASSERT_NEAR(c[static_cast<size_t>(i * n + j)], want, 1e-12 * (1 + static_cast<double>(k)))
            << m << " " << k << " " << n;
      }
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
