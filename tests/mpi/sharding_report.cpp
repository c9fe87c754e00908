// The row of a layout in gyre-shard's table, against numbers worked out by hand.

#include <gtest/gtest.h>

#include "apps/shard/report.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;

/// Two bins of one full document of 16 tokens each.
PackedHeader two_bins() {
  PackedHeader header;
  header.documents = 2;
  header.vocab_size = 10;
  const std::vector<int32_t> bounds{0, 16};
  for (const int64_t document : {0, 1}) {
    const std::vector<int64_t> documents{document};
    header.bins.add_bin(documents, bounds, bounds);
  }
  return header;
}

/// 2 heads of 4 elements, 1 KV head of 4 bytes: 32 FLOPs a pair, 32 bytes a token.
AttentionShape small_shape() {
  return {2, 1, 4, "f32", 32e-12, 32e-9};  // one pair and one token a second
}

ShardingResult row_of(const std::string& layout, std::vector<RankCost>& costs) {
  const PackedHeader header = two_bins();
  LayoutOptions options;
  options.cp = 4;
  ShardingPlan plan(header, find_layout(layout), options, false);
  return plan_layout(plan, small_shape(), world(), costs);
}

TEST(ShardingResult, ContiguousPartsOfADocument) {
  std::vector<RankCost> costs;
  const ShardingResult row = row_of("contiguous", costs);
  EXPECT_EQ(row.slots, 8);
  EXPECT_DOUBLE_EQ(row.padding, 0);
  EXPECT_DOUBLE_EQ(row.run_length, 4);
  EXPECT_DOUBLE_EQ(row.pair_ratio, 58.0 / 34);
  EXPECT_DOUBLE_EQ(row.worst_ratio, 58.0 / 34);
  EXPECT_DOUBLE_EQ(row.needed, 6.0 / 12);  // 0, 4, 8, 12 of the 12 that a ring brings
  EXPECT_DOUBLE_EQ(row.needed_most, 1);
  EXPECT_DOUBLE_EQ(row.needed_bytes, 2 * 12 * 32);
  EXPECT_DOUBLE_EQ(row.compute_s, 2 * 58);
  EXPECT_DOUBLE_EQ(row.communicate_s, 2 * 12);
  EXPECT_DOUBLE_EQ(row.step_s, 2 * 58);
  ASSERT_EQ(costs.size(), 4u);
  EXPECT_EQ(costs[1].pairs, 2 * 26);
  EXPECT_EQ(costs[3].kv_needed, 2 * 12);
  EXPECT_EQ(costs[2].real_tokens, 2 * 4);
}

TEST(ShardingResult, NeighbouringChunksAreOneRun) {
  std::vector<RankCost> costs;
  const ShardingResult row = row_of("zigzag", costs);  // rank 3 owns chunks 3 and 4
  EXPECT_DOUBLE_EQ(row.run_length, 16.0 / 7);
  EXPECT_DOUBLE_EQ(row.pair_ratio, 1);
  EXPECT_DOUBLE_EQ(row_of("striped", costs).run_length, 1);
}

}  // namespace GYRE_FILE
}  // namespace gyre
