// Log-probabilities among stored sets of ids, and their gradients, against whole rows.

#include "logprobs/kept_scores.hpp"

#include "selection_operations.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test;

GYRE_TEST_OPERATION(KeptLogprobs);

KeptLogprobs example() {
  LogitRows rows(3, 5);
  for (int64_t t = 0; t < 3; ++t)
    for (int64_t v = 0; v < 5; ++v) rows.at(t, v) = static_cast<double>(v);
  return {rows, DType::f32, {{1, 3, 4}, {}, {4, 0}}, {3, 2, 3}};
}

TEST(KeptScores, AreThoseOfTheExample) {
  for (const VocabPartition& vocab : partitions(5, world().size())) {
    const OperationResult got = example().run({vocab, Place()});
    EXPECT_NEAR(got.values[0][0], -1.349012, 1e-6);
    EXPECT_EQ(got.values[0][1], -INFINITY);  // no ids
    EXPECT_EQ(got.values[0][2], -INFINITY);  // not among them
  }
}

TEST(KeptScores, RowsThatAreNoDistributionAreNanOnAllRanksAndLeaveOthersAlone) {
  for (const double poison : {not_a_number, infinity, -infinity})
    for (const VocabPartition& vocab : partitions(5, world().size())) {
      KeptLogprobs o = example();
      for (const int64_t v : {0, 4}) o.rows.at(2, v) = poison;
      o.rows.at(0, 0) = o.rows.at(1, 3) = poison;  // not kept: not read
      const OperationResult got = o.run({vocab, Place()});
      EXPECT_NEAR(got.values[0][0], -1.349012, 1e-6);
      EXPECT_EQ(got.values[0][1], -INFINITY);
      EXPECT_TRUE(std::isnan(got.values[0][2])) << poison;
    }
}

TEST(KeptScores, ManyIdsOfARowTakeTheirOwnBlock) {
  // One row with all ids among rows with a few: blocks of 64 rows are as wide as their widest.
  KeptLogprobs o = KeptLogprobs::random(130, 700, DType::f32, 3);
  o.kept[70].resize(700);
  for (int32_t v = 0; v < 700; ++v) o.kept[70][v] = v;
  for (const VocabPartition& vocab : partitions(700, world().size()))
    o.expect_reference(o.run({vocab, Place()}), {vocab, Place()});
}

TEST(KeptScores, BadOptionsAreUsageErrorsOnAllRanks) {
  const VocabPartition vocab = balanced_partition(8, world().size());
  const auto message = [&](const std::vector<int64_t>& offsets, const Ints& ids,
                           const KeptOptions& options = {}) {
    return agreed_message([&] { KeptScores(2, vocab, {offsets, ids}, options, world()); });
  };
  EXPECT_EQ(message({0, 1}, {3}), "2 offsets of 1 kept ids; they must run from 0 to 1 over 2 rows");
  EXPECT_EQ(message({0, 2, 1}, {3}),
            "3 offsets of 1 kept ids; they must run from 0 to 1 over 2 rows");
  EXPECT_EQ(message({0, 1, 2}, {3, 8}), "kept id 1 is 8; ids are 0 to 7");
  EXPECT_EQ(message({0, 1, 2}, {3, 4}, {.temperature = 0}),
            "a temperature of 0; it must be positive and finite, and so its inverse in f32");
  const Doubles three(3, 1);
  EXPECT_EQ(message({0, 1, 2}, {3, 4}, {.temperatures = three}),
            "3 temperatures of 2 tokens; one for each, or none");
  if (world().size() == 1) return;
  const bool odd = world().rank() == 1;
  EXPECT_NE(message({0, 1, 2}, {3, odd ? 4 : 5}).find("the checksum of the sets' ids is "),
            std::string::npos);
}

}  // namespace GYRE_FILE
}  // namespace gyre
