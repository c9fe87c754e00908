// The largest logits of a split vocabulary against sorting whole rows: any partition, with ties,
// -inf, NaN and padding.

#include <rapidcheck.h>

#include "selection_operations.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test;

GYRE_TEST_OPERATION(LargestLogits);

TEST(VocabTopK, AnyPartitionTypeAndLengthIsTheStartOfTheSortedRows) {
  EXPECT_TRUE(rc::check("merged lists and sorting", [] {
    const int64_t vocab_size = *rc::gen::inRange<int64_t>(1, 300);
    const int64_t tokens = *rc::gen::inRange<int64_t>(0, 4);
    const int64_t k = *rc::gen::weightedOneOf<int64_t>(
        {{1, rc::gen::just(vocab_size)}, {3, rc::gen::inRange<int64_t>(1, 310)}});
    const double step = *rc::gen::element(0.125, 2.0);
    LogitRows rows =
        random_logits(tokens, vocab_size, DType::f32, 2, *rc::gen::inRange<uint64_t>(0, 99));
    for (double& z : rows.values) z = std::round(z / step) * step;
    if (*rc::gen::arbitrary<bool>())
      for (double& z : rows.values)
        if (z < 0) z = -infinity;
    const DType type = *rc::gen::element(DType::f32, DType::bf16);
    const LargestLogits o{rows, type, k};
    for (const VocabPartition& vocab : partitions(vocab_size, world().size())) {
      o.expect_reference(o.run({vocab, Place()}), {vocab, Place()});
      RC_ASSERT(!::testing::Test::HasFailure());
    }
  }));
}

TEST(VocabTopK, TheLargestAloneIsTheArgmaxWithTheLowestId) {
  LogitRows rows(1, 20);
  for (const int64_t v : {3, 9, 19}) rows.at(0, v) = 1;
  for (const VocabPartition& vocab : partitions(20, world().size()))
    EXPECT_EQ((LargestLogits{rows, DType::f32, 1}.run({vocab, Place()}).values[1]), Floats{3});
}

TEST(VocabTopK, NotANumberRanksAsTheLargest) {
  LogitRows rows = test::random_logits(1, 40, DType::f32);
  rows.at(0, 6) = infinity;
  for (const int64_t v : {5, 31}) rows.at(0, v) = not_a_number;
  for (const DType type : {DType::f32, DType::bf16})
    for (const VocabPartition& vocab : partitions(40, world().size())) {
      const auto top = LargestLogits{rows, type, 3}.run({vocab, Place()}).values;
      EXPECT_EQ(top[1], (Floats{5, 31, 6}));
      EXPECT_TRUE(std::isnan(top[0][0]) && std::isnan(top[0][1]));
    }
}

TEST(VocabTopK, WrongNumbersEndAllRanksAlike) {
  const auto error = [](int64_t k) {
    return agreed_message(
        [&] { VocabTopK(1, balanced_partition(64, world().size()), k, 1, world()); });
  };
  EXPECT_EQ(error(0), "the 0 largest logits; the smallest valid number is 1");
  EXPECT_EQ(error(on_last_rank() ? 3 : 2),
            differs(LargestLogits::agreement, "the number of logits a token", "2", "3"));
}

}  // namespace GYRE_FILE
}  // namespace gyre
