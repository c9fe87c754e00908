#include <fmt/format.h>

#include <limits>
#include <numeric>

#include "comm/agree.hpp"
#include "mpi_test.hpp"
#include "report/statistics.hpp"
#include "report/verify.hpp"

namespace gyre {
namespace GYRE_FILE {

TEST(ReportMerge, AllRanksSeeTheWorstOfAllRanks) {
  Communicator& world = test::world();
  Verification checks;
  const int rank = world.rank(), last = world.size() - 1;
  checks.check("hidden", 1).add(1 + 0.125 * rank, 1, [&] { return fmt::format("row {}", rank); });
  if (rank == last) checks.check("only on the last", 1).add(0, 0, [] { return ""; });
  checks.merge_over(world);
  ASSERT_EQ(checks.checks().size(), 2U);
  EXPECT_TRUE(checks.passed());
  EXPECT_EQ(checks.checks()[0].count(), world.size());
  EXPECT_DOUBLE_EQ(checks.checks()[0].max_error(), 0.125 * last);
  if (last > 0) {
    EXPECT_EQ(checks.checks()[0].where(), fmt::format("row {}, rank {}", last, last));
  }
}

TEST(ReportMerge, NanOnOneRankFailsAll) {
  Communicator& world = test::world();
  Verification checks;
  const double value =
      world.rank() == world.size() - 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
  checks.check("logprobs", 1).add(value, 1, [] { return "here"; });
  checks.merge_over(world);
  EXPECT_FALSE(checks.passed());
  const auto texts =
      all_gather_value(world, static_cast<int64_t>(std::hash<std::string>()(checks.text())));
  for (const int64_t text : texts) EXPECT_EQ(text, texts[0]);
}

TEST(ReportMerge, TolerancesAndFactorsAreJudgedByTheValuesOfAllRanks) {
  Communicator& world = test::world();
  Verification checks;
  const bool first = world.rank() == 0, last = world.rank() == world.size() - 1;
  const double value = last ? 16.0 * world.size() : 0;  // 16 on average
  const auto here = [] { return "here"; };
  checks.check("within", 15).add(value, value, here);
  checks.check("above", 17).add(value, value, here);
  checks.check("twice", 1e-3).add(first ? 8 : 2, first ? 4 : 1, here);
  checks.check("twice but once", 1e-3).add(first ? 8 : 3, first ? 4 : 1, here);
  checks.check("four times, then twice", 1e-3).add(first ? 8 : 2, first ? 2 : 1, here);
  checks.merge_over(world);
  EXPECT_TRUE(checks.checks()[0].passed()) << checks.text();
  EXPECT_FALSE(checks.checks()[1].passed());
  const auto hints = [&](size_t check) {
    return checks.checks()[check].fault().find("by a factor ") != std::string::npos;
  };
  EXPECT_EQ(hints(2), world.size() > 1) << checks.text();
  EXPECT_FALSE(hints(3));
  EXPECT_FALSE(hints(4));
}

TEST(ReportMerge, SamplesArriveInOrderOfRank) {
  Communicator& world = test::world();
  std::vector<double> mine(world.rank());  // rank 0 has none
  std::iota(mine.begin(), mine.end(), 100.0 * world.rank());
  const Samples all = gather_samples(world, mine);
  ASSERT_EQ(std::ssize(all), world.size());
  for (int r = 0; r < world.size(); ++r) {
    const std::vector<double>& samples = all[r];
    ASSERT_EQ(std::ssize(samples), r);
    for (int i = 0; i < r; ++i) EXPECT_EQ(samples[i], 100.0 * r + i);
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
