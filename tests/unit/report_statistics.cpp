#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "mpi_test.hpp"
#include "report/statistics.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

TEST(Statistics, OfKnownSamples) {
  // Mean 5, squared deviations 9 1 1 1 0 0 4 16: sum 32, over n - 1 = 7.
  const std::vector<double> samples = {2, 4, 4, 4, 5, 5, 7, 9};
  const Statistics s = summarize(samples);
  EXPECT_EQ(s.count, 8);
  EXPECT_DOUBLE_EQ(s.min, 2);
  EXPECT_DOUBLE_EQ(s.median, 4.5);
  EXPECT_DOUBLE_EQ(s.p95, 7 + 0.65 * 2);  // position 0.95 * 7 = 6.65
  EXPECT_DOUBLE_EQ(s.mean, 5);
  EXPECT_DOUBLE_EQ(s.cv, std::sqrt(32.0 / 7) / 5);
}

TEST(Statistics, OfOneSampleHaveNoSpread) {
  const Statistics s = summarize(std::vector<double>{3});
  EXPECT_EQ(s.median, 3);
  EXPECT_EQ(s.p95, 3);
  EXPECT_TRUE(std::isnan(s.cv));
}

TEST(Statistics, OfNothingOrNanAreUnknown) {
  for (const std::vector<double>& samples : {std::vector<double>{}, std::vector<double>{1, nan}}) {
    const Statistics s = summarize(samples);
    for (const double x : {s.min, s.median, s.p95, s.mean, s.cv}) EXPECT_TRUE(std::isnan(x));
  }
}

TEST(Statistics, AreOrderedAndIgnoreOrder) {
  EXPECT_TRUE(rc::check("min <= median <= p95 <= max", [] {
    auto samples = *rc::gen::nonEmpty(rc::gen::container<std::vector<double>>(
        rc::gen::map(rc::gen::inRange(-1000, 1000), [](int i) { return i / 8.0; })));
    const Statistics s = summarize(samples);
    RC_ASSERT(s.min <= s.median);
    RC_ASSERT(s.median <= s.p95);
    RC_ASSERT(s.p95 <= *std::max_element(samples.begin(), samples.end()));
    std::reverse(samples.begin(), samples.end());
    RC_ASSERT(summarize(samples).median == s.median);
    RC_ASSERT(quantile(samples, 0.5) == s.median);
    RC_ASSERT(quantile(samples, 0) == s.min);
  }));
}

TEST(SlowestRank, IsTheMaximumOfEachIteration) {
  EXPECT_EQ(slowest_rank({{1, 5, 3}, {2, 4, 3}}), (std::vector<double>{2, 5, 3}));
  EXPECT_TRUE(slowest_rank({}).empty());
}

TEST(SlowestRank, NanOfAnyRankStays) {
  EXPECT_TRUE(std::isnan(slowest_rank({{nan}, {1}})[0]));
  EXPECT_TRUE(std::isnan(slowest_rank({{1}, {nan}, {2}})[0]));
}

TEST(Imbalance, IsMaxOverMeanMinusOne) {
  EXPECT_DOUBLE_EQ(imbalance(std::vector<double>{2, 2, 2}), 0);
  EXPECT_DOUBLE_EQ(imbalance(std::vector<double>{1, 3}), 0.5);
  EXPECT_TRUE(std::isnan(imbalance(std::vector<double>{0, 0})));
}

}  // namespace GYRE_FILE
}  // namespace gyre
