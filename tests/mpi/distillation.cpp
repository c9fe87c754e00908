// A student's log-probabilities at a teacher's largest logits, over all ranks, against whole rows
// in double precision.

#include "logprob_operations.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test;

GYRE_TEST_OPERATION(DistillationOfAllIds);
GYRE_TEST_OPERATION(DistillationOfSomeIds);

TEST(Distillation, ANaNOfAnyShardReachesAllRanks) {
  const VocabPartition vocab = partitions(40, world().size()).back();
  const auto poisoned = [&](auto c) {
    c.rows.at(0, 39) = NAN;
    c.rows.at(1, c.ids[3]) = NAN;
    return c.run({vocab, Place()}).values[0];
  };
  const DistillationOfAllIds c(2, 40, 3, DType::bf16, false);
  const Floats all = poisoned(c),
               some = poisoned(DistillationOfSomeIds(2, 40, 3, DType::bf16, false));
  for (size_t k = 0; k < 3; ++k) {
    EXPECT_TRUE(std::isnan(all[k]));
    EXPECT_EQ(std::isnan(some[k]),
              std::find(c.ids.begin(), c.ids.begin() + 3, 39) != c.ids.begin() + 3);
    EXPECT_TRUE(std::isnan(some[3 + k]));
  }
}

TEST(Distillation, WrongOptionsEndAllRanksAlike) {
  const int n = world().size();
  const VocabPartition vocab = balanced_partition(30, n);
  const auto error = [&](const DistillationOptions& o) {
    return agreed_message([&] { DistillationScores(4, vocab, o, world()); });
  };
  const bool last = on_last_rank();
  EXPECT_EQ(error({.ids_per_token = last ? 0 : 2}),
            "0 ids a token; the fewest are 1" + test::found_on(n - 1));
  EXPECT_EQ(error({.ids_per_token = 5, .renormalised = true, .entropy = true}),
            "an entropy needs the whole vocabulary, but the student is renormalised over 5 ids");
  EXPECT_EQ(error({.ids_per_token = 5, .renormalised = last}),
            differs("distillation", "whether the student is renormalised over the ids", "0", "1"));
  EXPECT_EQ(error({.ids_per_token = last ? 3 : 2}),
            differs("log-probabilities", "the number of ids a token", "2", "3"));
}

}  // namespace GYRE_FILE
}  // namespace gyre
