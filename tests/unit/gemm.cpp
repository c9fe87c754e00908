#include "runtime/gemm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "close.hpp"
#include "runtime/buffer.hpp"

namespace gyre {
namespace {

using test::rounding;

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

void check(int64_t m, int64_t n, int64_t k, int64_t extra, bool accumulate) {
  SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << ", stride + " << extra
                                  << (accumulate ? ", accumulating" : ""));
  std::mt19937 random(7);
  Padded a(m, k, extra), b(k, n, 2 * extra), c(m, n, extra), want(m, n, 0), size(m, n, 0);
  a.fill(random);
  b.fill(random);
  if (accumulate) c.fill(random);
  for (int64_t i = 0; i < m; ++i) {
    std::copy_n(c.view.row(i), n, want.view.row(i));
    for (int64_t j = 0; j < n; ++j) {
      float sum = accumulate ? std::abs(c.view(i, j)) : 0.0F;
      for (int64_t l = 0; l < k; ++l) sum += std::abs(a.view(i, l) * b.view(l, j));
      size.view(i, j) = sum;
    }
  }
  gemm(a.view, b.view, c.view, accumulate);
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

TEST(Gemm, HonoursStrides) {
  for (const int64_t m : {1, 7, 130}) check(m, 77, 33, 5, false);
  check(129, 65, 300, 3, true);
}

TEST(Gemm, Accumulates) {
  check(64, 64, 512, 0, true);
  check(3, 10, 600, 0, true);
}

TEST(Gemm, EmptyShapes) {
  for (const auto& [m, n, k] : {std::array{0, 5, 4}, {5, 0, 4}, {5, 4, 0}, {0, 0, 0}}) {
    check(m, n, k, 1, false);
    check(m, n, k, 1, true);
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

}  // namespace
}  // namespace gyre
