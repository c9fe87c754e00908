// Divergences of a student's largest logits with a sampled tail, and their gradients, over all
// ranks, against whole rows in double precision.

#include "divergence_operations.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test;

GYRE_TEST_OPERATION(DivergencesOfRows);
GYRE_TEST_OPERATION(DivergencesOfGivenIds);

TEST(TopKDivergence, IsThatOfTheExample) {
  LogitRows student(2, 5), teacher(2, 5);
  for (int64_t v = 0; v < 5; ++v)
    for (const int64_t t : {0, 1}) student.at(t, v) = v, teacher.at(t, v) = 4 - v;
  DivergencesOfRows o(student, teacher, DType::f32, 2);
  o.targets = {0, 4};
  for (const VocabPartition& vocab : partitions(5, world().size())) {
    const Floats got = o.run({vocab, Place()}).values[0];
    EXPECT_NEAR(got[0], -0.986122, 1e-6);
    EXPECT_NEAR(got[1], 3.013878, 1e-6);  // without the target, which is among the ids
  }
}

TEST(TopKDivergence, WrongOptionsEndAllRanksAlike) {
  const int n = world().size();
  const VocabPartition vocab = balanced_partition(30, n);
  const auto error = [&](const TopKDivergenceOptions& o) {
    return agreed_message([&] { TopKDivergence(4, vocab, o, world()); });
  };
  const bool last = on_last_rank();
  EXPECT_EQ(error({.k = last ? 0 : 2}),
            "the 0 largest logits; the nearest valid number is 1" + test::found_on(n - 1));
  EXPECT_EQ(error({.k = 65536}), "the 65536 largest logits; the nearest valid number is 65535");
  EXPECT_EQ(error({.k = last ? 3 : 2}),
            differs("top-k divergences", "the number of logits a token", "2", "3"));
  EXPECT_EQ(error({.tail = last ? TailGradient::advantage : TailGradient::unbiased}),
            differs("top-k divergences", "the gradient of the sampled term", "0", "1"));
  EXPECT_EQ(error({.ids_are_given = last}),
            differs("top-k divergences", "whether ids are given", "0", "1"));
}

}  // namespace GYRE_FILE
}  // namespace gyre
