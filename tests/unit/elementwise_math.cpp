// Rotations of queries and keys at any position, as the decoder's kernels compute them.

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
          const double frequency =
              std::pow(theta, -2.0 * static_cast<double>(pair) / static_cast<double>(head_dim));
          const double angle = static_cast<double>(position) * frequency;
          const Rotation r = rope_rotation(position, rope_turns(frequency), 1);
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
  const Rotation none = rope_rotation(0, 0.1, 1);
  EXPECT_EQ(none.low(3, 5), 3);
  EXPECT_EQ(none.high(3, 5), 5);
  const Rotation longer = rope_rotation(0, 0.1, 1.5F);
  EXPECT_EQ(longer.low(2, 4), 3);
  EXPECT_EQ(longer.high(2, 4), 6);
}

}  // namespace GYRE_FILE
}  // namespace gyre
