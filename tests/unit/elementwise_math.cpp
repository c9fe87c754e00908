// The arithmetic of the decoder's kernels, on the host.

#include "model/elementwise_math.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "close.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::rounding;

TEST(ElementwiseMath, RotationsAreRightAtAnyPosition) {
  for (const int64_t head_dim : {2, 8, 128})
    for (const double theta : {1e4, 5e5})
      for (const int64_t position : {0, 1, 3, 255, 4096, 131071, 131072, 1000000, 16777217})
        for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
          const double angle =
              static_cast<double>(position) *
              std::pow(theta, -2.0 * static_cast<double>(pair) / static_cast<double>(head_dim));
          const Rotation r = rope_rotation(position, rope_turns(pair, head_dim, theta));
          EXPECT_NEAR(static_cast<double>(r.cos), std::cos(angle), rounding(1))
              << position << " pair " << pair << " of " << head_dim / 2;
          EXPECT_NEAR(static_cast<double>(r.sin), std::sin(angle), rounding(1))
              << position << " pair " << pair << " of " << head_dim / 2;
        }
}

TEST(ElementwiseMath, ARotationTurnsLowTowardsHigh) {
  const Rotation quarter{0, 1};
  EXPECT_EQ(quarter.low(3, 5), -5);
  EXPECT_EQ(quarter.high(3, 5), 3);
  const Rotation none = rope_rotation(0, 0.1);
  EXPECT_EQ(none.low(3, 5), 3);
  EXPECT_EQ(none.high(3, 5), 5);
}

TEST(ElementwiseMath, SiluProductMatchesItsDefinition) {
  for (float gate = -30; gate < 30; gate += 0.37F) {
    const auto g = static_cast<double>(gate);
    const double want = g / (1 + std::exp(-g)) * 1.5;
    // 1 + |g| bounds the condition number of silu.
    EXPECT_NEAR(static_cast<double>(silu_product(gate, 1.5F)), want,
                rounding(1) * std::abs(want) * (1 + std::abs(g)))
        << gate;
  }
}

TEST(ElementwiseMath, SiluProductOfExtremes) {
  EXPECT_EQ(silu_product(-1e4F, 1), 0);
  EXPECT_EQ(silu_product(0, 1), 0);
  EXPECT_EQ(silu_product(88, 1), 88);
  EXPECT_EQ(silu_product(1e4F, 2), 2e4F);
  EXPECT_TRUE(std::isnan(silu_product(std::nanf(""), 1)));
}

TEST(ElementwiseMath, RmsScale) {
  EXPECT_FLOAT_EQ(rms_scale(16, 4, 0), 0.5F);
  EXPECT_FLOAT_EQ(rms_scale(0, 4, 0.25F), 2);
}

}  // namespace GYRE_FILE
}  // namespace gyre
