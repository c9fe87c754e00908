// Probabilities that are projected to another vocabulary, and their gradients, against whole rows.

#include "logprobs/projected_probabilities.hpp"

#include "projection_operation.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test;

GYRE_TEST_OPERATION(ProjectedRows);

ProjectedRows example() {
  ProjectedRows o{LogitRows(2, 5), DType::f32, 3};
  for (int64_t t = 0; t < 2; ++t)
    for (int64_t v = 0; v < 5; ++v) o.rows.at(t, v) = static_cast<double>(v);
  o.offsets = {0, 0, 1, 1, 2, 3};
  o.columns = {0, 0, 1};
  o.weights = {1, 0.5F, 1};
  o.g = {1, 0, 5, 0, 0, 0};
  return o;
}

TEST(ProjectedProbabilities, AreThoseOfTheExample) {
  for (const VocabPartition& vocab : partitions(5, world().size())) {
    const OperationResult got = example().run({vocab, Place()});
    EXPECT_NEAR(got.values[0][0], 0.1487457, 1e-6);
    EXPECT_NEAR(got.values[0][1], 0.6364086, 1e-6);
    EXPECT_EQ(got.values[0][2], 0);  // no entries
  }
}

TEST(ProjectedProbabilities, RowsThatAreNoDistributionAreNanOnAllRanksAndLeaveOthersAlone) {
  for (const double poison : {not_a_number, infinity, -infinity})
    for (const VocabPartition& vocab : partitions(5, world().size())) {
      ProjectedRows o = example();
      for (int64_t v = 0; v < 5; ++v)
        if (poison == -infinity || v == 2) o.rows.at(1, v) = poison;  // id 2 has no entry
      const OperationResult got = o.run({vocab, Place()});
      EXPECT_NEAR(got.values[0][1], 0.6364086, 1e-6);
      for (int64_t c = 0; c < 3; ++c) EXPECT_TRUE(std::isnan(got.values[0][3 + c])) << poison;
      o.expect_reference(got, {vocab, Place()});
    }
}

TEST(ProjectedProbabilities, BadMatricesAreUsageErrorsOnAllRanks) {
  const VocabPartition vocab = balanced_partition(8, world().size());
  ProjectedRows o = ProjectedRows::random(2, 8, DType::f32, 3, 1);
  const auto message = [&](const SparseMatrixRef& matrix, const ProjectionOptions& options = {}) {
    return agreed_message([&] { ProjectedProbabilities(2, vocab, matrix, options, world()); });
  };
  EXPECT_EQ(message(o.matrix()), "no error");
  SparseMatrixRef short_one = o.matrix();
  short_one.offsets = short_one.offsets.first(8);
  EXPECT_EQ(message(short_one),
            "projection_offsets has 8 elements; it must have 9, one more than the rows");
  ProjectedRows wrong = o;
  wrong.columns[4] = 3;
  EXPECT_EQ(message(wrong.matrix()), "projection_columns[4], of row 1, is 3; columns are 0 to 2");
  EXPECT_EQ(message(o.matrix(), {.temperature = 0}),
            "a temperature of 0; it must be positive and finite, and so its inverse in f32");
  if (world().size() == 1) return;
  wrong = o;
  if (world().rank() == 1) wrong.weights[0] += 1;
  EXPECT_NE(message(wrong.matrix()).find("the checksum of the projection's weights is "),
            std::string::npos);
}

}  // namespace GYRE_FILE
}  // namespace gyre
