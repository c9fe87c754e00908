#include "model/elementwise.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "close.hpp"
#include "runtime/buffer.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::rounding;

/// A random matrix with NaN between its rows.
struct Matrix {
  Matrix(int64_t rows, int64_t cols, unsigned seed)
      : storage(rows * (cols + 3)), view(storage.data(), rows, cols, cols + 3) {
    std::fill_n(storage.data(), storage.size(), std::numeric_limits<float>::quiet_NaN());
    std::mt19937 random(seed);
    for (int64_t r = 0; r < rows; ++r)
      test::fill_normal({view.row(r), static_cast<size_t>(cols)}, random);
  }
  bool gaps_untouched() const {
    for (int64_t r = 0; r < view.rows; ++r)
      for (int64_t c = view.cols; c < view.stride; ++c)
        if (!std::isnan(storage[r * view.stride + c])) return false;
    return true;
  }
  Buffer<float> storage;
  MatrixView<float> view;
};

double at(const Matrix& m, int64_t r, int64_t c) {
  return static_cast<double>(m.view(r, c));
}

constexpr int64_t all_columns[] = {1, 4, 15, 16, 17, 64, 67, 192};

void check_rms_norm() {
  for (const int64_t cols : all_columns) {
    Matrix x(5, cols, 1), out(5, cols, 2), w(1, cols, 3);
    const std::span<const float> weight(w.view.row(0), static_cast<size_t>(cols));
    rms_norm(x.view, weight, 1e-5F, out.view);
    for (int64_t r = 0; r < 5; ++r) {
      double sum = 0;
      for (int64_t c = 0; c < cols; ++c) sum += at(x, r, c) * at(x, r, c);
      const double scale = 1 / std::sqrt(sum / static_cast<double>(cols) + 1e-5);
      for (int64_t c = 0; c < cols; ++c) {
        const double want = at(x, r, c) * scale * at(w, 0, c);
        EXPECT_NEAR(out.view(r, c), want, rounding(static_cast<double>(cols)) * std::abs(want));
      }
    }
    EXPECT_TRUE(out.gaps_untouched());
    rms_norm(x.view, weight, 1e-5F, x.view);
    for (int64_t r = 0; r < 5; ++r)
      EXPECT_TRUE(std::equal(x.view.row(r), x.view.row(r) + cols, out.view.row(r))) << "in place";
  }
}

TEST(Elementwise, RmsNorm) {
  test::on_every_simd_target(check_rms_norm);
}

TEST(Elementwise, RmsNormOfZeros) {
  const std::vector<float> zeros(10, 0.0F), ones(10, 1.0F);
  std::vector<float> out(10, 5.0F);
  rms_norm({zeros.data(), 1, 10}, ones, 1e-5F, {out.data(), 1, 10});
  EXPECT_EQ(out, zeros);
}

void check_rope(int64_t head_dim, double theta, const std::vector<int32_t>& positions) {
  const auto rows = std::ssize(positions);
  constexpr int64_t heads = 3;
  Matrix x(rows, heads * head_dim, 4);
  const Matrix before(rows, heads * head_dim, 4);
  apply_rope(x.view, head_dim, theta, positions);
  const int64_t half = head_dim / 2;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < half; ++i) {
        const double angle =
            positions[static_cast<size_t>(r)] *
            std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
        const int64_t low = h * head_dim + i, high = low + half;
        const double a = at(before, r, low), b = at(before, r, high);
        const double tolerance = rounding(1) * (std::abs(a) + std::abs(b));
        EXPECT_NEAR(x.view(r, low), a * std::cos(angle) - b * std::sin(angle), tolerance);
        EXPECT_NEAR(x.view(r, high), b * std::cos(angle) + a * std::sin(angle), tolerance);
      }
  EXPECT_TRUE(x.gaps_untouched());
}

TEST(Elementwise, RopeMatchesDirectAngles) {
  for (const int64_t head_dim : {2, 6, 8, 32, 64, 80, 128})
    test::on_every_simd_target([&] {
      check_rope(head_dim, 10000, {0, 1, 2, 2, 255, 256, 257, 5000, 0});
    });
}

TEST(Elementwise, RopeFarPositionsAndOtherBases) {
  check_rope(64, 500000, {131071, 131072, 1000000, 3});
  check_rope(64, 10000, {131071, 7});
}

TEST(Elementwise, RopeAtZeroIsTheIdentity) {
  Matrix x(2, 64, 5);
  const Matrix before(2, 64, 5);
  apply_rope(x.view, 32, 10000, std::vector<int32_t>{0, 0});
  for (int64_t r = 0; r < 2; ++r)
    EXPECT_TRUE(std::equal(x.view.row(r), x.view.row(r) + 64, before.view.row(r)));
}

void check_silu_multiply() {
  for (const int64_t cols : all_columns) {
    Matrix gate(4, cols, 6), up(4, cols, 7), out(4, cols, 8);
    for (int64_t c = 0; c < cols; ++c) gate.view(1, c) *= 30;
    silu_multiply(gate.view, up.view, out.view);
    for (int64_t r = 0; r < 4; ++r)
      for (int64_t c = 0; c < cols; ++c) {
        const double g = at(gate, r, c);
        const double want = g / (1 + std::exp(-g)) * at(up, r, c);
        // 1 + |g| bounds the condition number of silu.
        EXPECT_NEAR(out.view(r, c), want, rounding(1) * std::abs(want) * (1 + std::abs(g)) + 1e-37);
      }
    EXPECT_TRUE(out.gaps_untouched());
    silu_multiply(gate.view, up.view, gate.view);
    for (int64_t r = 0; r < 4; ++r)
      EXPECT_TRUE(std::equal(gate.view.row(r), gate.view.row(r) + cols, out.view.row(r)));
  }
}

TEST(Elementwise, SiluMultiply) {
  test::on_every_simd_target(check_silu_multiply);
}

TEST(Elementwise, SiluOfExtremes) {
  const std::vector<float> gate{-1e4F, -88.0F, 0.0F, 88.0F, 1e4F, std::nanf("")};
  const std::vector<float> up(gate.size(), 1.0F);
  std::vector<float> out(gate.size());
  const auto columns = std::ssize(gate);
  silu_multiply({gate.data(), 1, columns}, {up.data(), 1, columns}, {out.data(), 1, columns});
  EXPECT_EQ(out[0], 0.0F);
  EXPECT_NEAR(out[1], 0.0F, 1e-36);
  EXPECT_EQ(out[2], 0.0F);
  EXPECT_EQ(out[3], 88.0F);
  EXPECT_EQ(out[4], 1e4F);
  EXPECT_TRUE(std::isnan(out[5]));
}

void check_add_in_place() {
  for (const int64_t cols : all_columns) {
    Matrix x(3, cols, 9), y(3, cols, 10);
    const Matrix before(3, cols, 9);
    add_in_place(x.view, y.view);
    for (int64_t r = 0; r < 3; ++r)
      for (int64_t c = 0; c < cols; ++c) EXPECT_EQ(x.view(r, c), before.view(r, c) + y.view(r, c));
    EXPECT_TRUE(x.gaps_untouched());
  }
}

TEST(Elementwise, AddInPlace) {
  test::on_every_simd_target(check_add_in_place);
}

TEST(Elementwise, NoRows) {
  const std::vector<float> weight(8, 1.0F);
  const MatrixView<float> none(nullptr, 0, 8);
  rms_norm(none, weight, 1e-5F, none);
  apply_rope(none, 8, 10000, {});
  silu_multiply(none, none, none);
  add_in_place(none, none);
}

}  // namespace GYRE_FILE
}  // namespace gyre
