// The small collectives under file work.

#include <gtest/gtest.h>

#include "comm/agree.hpp"
#include "comm/collective.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::world;

/// Rank r has r numbers, the rank itself each.
std::vector<int64_t> numbers_of(int rank) {
  return std::vector<int64_t>(rank, rank);
}

TEST(IoCollective, ElementsInRankOrderInAnyNumberOfRounds) {
  std::vector<int64_t> expected;
  for (int r = 0; r < world().size(); ++r)
    for (int64_t number : numbers_of(r)) expected.push_back(number);
  const std::vector<int64_t> mine = numbers_of(world().rank());
  for (int64_t limit : {1, 13, 64, 1 << 20}) {
    const int64_t old = set_transfer_limit_bytes(limit);
    EXPECT_EQ(all_gather_elements(world(), std::span<const int64_t>(mine)), expected) << limit;
    set_transfer_limit_bytes(old);
  }
}

TEST(IoCollective, Texts) {
  const std::string nul("a\0b", 3);
  std::vector<std::string> mine{"", fmt::format("rank {}", world().rank()), nul};
  if (world().rank() == 1) mine.clear();
  std::vector<std::string> expected;
  for (int r = 0; r < world().size(); ++r)
    if (r != 1) expected.insert(expected.end(), {"", fmt::format("rank {}", r), nul});
  EXPECT_EQ(all_gather_texts(world(), mine), expected);
  EXPECT_EQ(broadcast_texts(world(), mine), (std::vector<std::string>{"", "rank 0", nul}));
  EXPECT_TRUE(broadcast_texts(world(), {}).empty());
}

TEST(IoCollective, OnlyRootWorksAndAllRanksHearOfItsError) {
  int calls = 0;
  run_on_root(world(), "test", [&] { ++calls; });
  EXPECT_EQ(calls, world().rank() == 0 ? 1 : 0);
  expect_error(ExitCode::usage, "no number 7",
               [] { run_on_root(world(), "test", [] { throw_usage("no number {}", 7); }); });
  expect_error(ExitCode::runtime, "counting: vector",
               [] { run_on_root(world(), "counting", [] { (void)std::vector<int>().at(3); }); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
