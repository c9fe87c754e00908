#include "attention/merge.hpp"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "attention/array_ops.hpp"
#include "close.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr double infinity = std::numeric_limits<double>::infinity();

TEST(Merge, EmptyWithEmptyIsEmpty) {
  const MergeWeights<float> w = merge_lse(-HUGE_VALF, -HUGE_VALF);
  EXPECT_EQ(w.w1, 0);
  EXPECT_EQ(w.w2, 0);
  EXPECT_EQ(w.lse, -HUGE_VALF);
}

TEST(Merge, EmptyIsTheIdentityOnBothSides) {
  for (const double lse : {-1e30, -3.5, 0.0, 1e4}) {
    const MergeWeights<double> left = merge_lse(-infinity, lse), right = merge_lse(lse, -infinity);
    EXPECT_EQ(left.w1, 0);
    EXPECT_EQ(left.w2, 1);
    EXPECT_EQ(left.lse, lse);
    EXPECT_EQ(right.w1, 1);
    EXPECT_EQ(right.w2, 0);
    EXPECT_EQ(right.lse, lse);
  }
}

template <class T>
void expect_nan_stays() {
  constexpr T nan = std::numeric_limits<T>::quiet_NaN(), inf = std::numeric_limits<T>::infinity();
  for (const T other : {-inf, T(-3), T(0), T(1e4), nan})
    for (const MergeWeights<T>& w : {merge_lse(nan, other), merge_lse(other, nan)}) {
      EXPECT_TRUE(std::isnan(w.w1)) << other;
      EXPECT_TRUE(std::isnan(w.w2)) << other;
      EXPECT_TRUE(std::isnan(w.lse)) << other;
    }
}

TEST(Merge, NanStaysNanOnBothSides) {
  expect_nan_stays<float>();
  expect_nan_stays<double>();
}

TEST(Merge, WeightsSumToOneAndMatchTheDefinition) {
  for (const double a : {-20.0, -1.0, 0.0, 2.0})
    for (const double b : {-7.0, 0.0, 3.0, 12.0}) {
      const MergeWeights<double> w = merge_lse(a, b);
      const double sum = std::exp(a) + std::exp(b);
      EXPECT_NEAR(w.w1 + w.w2, 1, 1e-15);
      EXPECT_NEAR(w.w1, std::exp(a) / sum, 1e-15);
      EXPECT_NEAR(w.lse, std::log(sum), 1e-14);
      const MergeWeights<double> swapped = merge_lse(b, a);
      EXPECT_EQ(w.w1, swapped.w2);
      EXPECT_EQ(w.lse, swapped.lse);
    }
}

TEST(Merge, LargeCommonOffsetsCancel) {
  for (const float offset : {-1e4F, 1e4F, 1e30F}) {
    const MergeWeights<float> w = merge_lse(offset, offset);
    EXPECT_EQ(w.w1, 0.5F);
    EXPECT_EQ(w.w2, 0.5F);
    EXPECT_NEAR(w.lse, offset, 1 + std::abs(offset) * 0x1p-23F);
  }
}

TEST(Merge, FarApartPartialsKeepTheLarger) {
  const MergeWeights<float> w = merge_lse(-1000.0F, 1000.0F);
  EXPECT_EQ(w.w1, 0);
  EXPECT_EQ(w.w2, 1);
  EXPECT_EQ(w.lse, 1000.0F);
}

TEST(Merge, OrderOfThreePartialsDoesNotMatter) {
  const float l1 = -2.5F, l2 = 4.0F, l3 = 3.25F;
  const MergeWeights<float> a = merge_lse(l1, l2), abc = merge_lse(a.lse, l3);
  const MergeWeights<float> b = merge_lse(l2, l3), bca = merge_lse(l1, b.lse);
  const double tolerance = test::rounding(3);
  EXPECT_NEAR(abc.lse, bca.lse, tolerance * std::abs(abc.lse));
  EXPECT_NEAR(abc.w1 * a.w1, bca.w1, tolerance);
  EXPECT_NEAR(abc.w2, bca.w2 * b.w2, tolerance);
}

/// Two rows of one head; outputs of one element.
template <class T = bf16>
struct PartialRows {
  std::vector<T> out;
  std::vector<float> lse;
  Partial view() { return {MatrixView<T>{out.data(), 2, 1, 1}, stats()}; }
  MatrixView<float> stats() { return {lse.data(), 2, 1, 1}; }
};

TEST(Merge, OfOutputsAtTheEndRoundsEverySumAndLeavesOutWhatSawNoKey) {
  HostStream stream;
  PartialRows<> sum{{to_bf16(256), to_bf16(2)}, {0, -HUGE_VALF}};
  PartialRows<> one{{to_bf16(1), to_bf16(3)}, {0, -HUGE_VALF}};
  for (int times = 0; times < 2; ++times)  // 256 + 1 rounds to 256; f32 would give 258
    add_output(sum.view(), one.view(), stream);
  EXPECT_EQ(to_float(sum.out[0]), 256);
  EXPECT_EQ(to_float(sum.out[1]), 2);
  sum.lse = {std::log(2.0F), 0};
  const std::vector<float> before = {0, -HUGE_VALF};
  rescale_output(sum.view(), {before.data(), 2, 1, 1}, stream);
  EXPECT_EQ(to_float(sum.out[0]), 128);
  EXPECT_EQ(to_float(sum.out[1]), 0);
}

TEST(Merge, AtTheEndIsTheSoftmaxOverAllKeys) {
  HostStream stream;
  const std::array<float, 6> terms = {-HUGE_VALF, -40, -3.5F, 0.25F, 12, 13};
  const float x = 0.75F, y = -2.5F;
  const double tolerance = test::rounding(8) * (1 + 40);  // exp turns rounding of 40 into a factor
  for (const float a : terms)
    for (const float b : terms) {
      PartialRows<float> sum{{x, y}, {a, b}}, part{{y, x}, {b, a}};
      const std::vector<float> before = sum.lse;
      merge_statistics(sum.stats(), part.stats(), stream);
      rescale_output(sum.view(), {before.data(), 2, 1, 1}, stream);
      add_output(sum.view(), part.view(), stream);
      const double of_a = std::exp(double{a}), of_b = std::exp(double{b}), all = of_a + of_b;
      for (const size_t row : {0, 1}) {
        if (all == 0) {
          EXPECT_EQ(sum.lse[row], -HUGE_VALF);
          EXPECT_EQ(sum.out[row], 0);
          continue;
        }
        const double out = (x * of_a + y * of_b) / all;
        EXPECT_NEAR(sum.lse[row], std::log(all), test::rounding(4) * (1 + std::abs(std::log(all))));
        EXPECT_NEAR(sum.out[row], out, tolerance) << a << " and " << b;
      }
    }
}

TEST(Merge, OfStatisticsAtTheEndIsThatOfTransformerEngine) {
  HostStream stream;
  const std::array<float, 4> terms = {-HUGE_VALF, -3.5F, 0.25F, 12};
  for (const float a : terms)
    for (const float b : terms) {
      PartialRows<> sum{{}, {a, b}}, part{{}, {b, a}};
      merge_statistics(sum.stats(), part.stats(), stream);
      const float top = std::max(a, b), low = std::min(a, b);
      const float want = std::isinf(low) ? top : top + std::log1p(std::exp(low - top));
      EXPECT_EQ(sum.lse[0], want);
      EXPECT_EQ(sum.lse[1], want);
    }
}

}  // namespace GYRE_FILE
}  // namespace gyre
