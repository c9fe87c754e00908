// The checks of gyre-pack fail when a packing is wrong.

#include <gtest/gtest.h>

#include "apps/pack/report.hpp"

namespace gyre {
namespace GYRE_FILE {

Verification checked(const std::vector<Bin>& bins) {
  const std::vector<int64_t> lengths = {4, 3, 9, 1};
  Verification checks;
  check_bins(bins, lengths, 8, 4, "test", checks);
  return checks;
}

TEST(CheckBins, AcceptsWholePackingsAndItemsThatAreTooLongByThemselves) {
  EXPECT_TRUE(checked({{0, 1}, {2}, {3}}).passed());
}

TEST(CheckBins, NoticesOverfullBinsAfterRounding) {
  const Verification checks = checked({{0, 1, 3}, {2}});  // 4 + 4 + 4 slots of 8
  EXPECT_FALSE(checks.passed());
  EXPECT_NE(checks.text().find("test bin 0: 12 slots"), std::string::npos) << checks.text();
}

TEST(CheckBins, NoticesMissingAndRepeatedItems) {
  EXPECT_NE(checked({{0, 1}, {2}}).text().find("test item 3"), std::string::npos);
  EXPECT_NE(checked({{0, 1}, {2}, {3, 0}}).text().find("test item 0"), std::string::npos);
}

}  // namespace GYRE_FILE
}  // namespace gyre
