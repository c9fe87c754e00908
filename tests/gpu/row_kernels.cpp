// Row statistics and row gradients on the device: the suites of every backend.

#include "logprobs/records/score_records.hpp"
#include "logprobs/rows/cuda_row_kernels.hpp"
#include "row_gradient_cases.hpp"
#include "row_statistics_cases.hpp"
#include "row_transform_cases.hpp"
#include "score_checks.hpp"

namespace gyre::test::row_kernels {

GYRE_RUN_ON(device, RowStatistics);
GYRE_RUN_ON(device, RowGradient);
GYRE_RUN_ON(device, RowTransform);

using CudaRowPasses = RowKernelTest;
GYRE_RUN_ON(device, CudaRowPasses);

TEST_P(CudaRowPasses, ManyPassesReuseTheirMemory) {
  // More passes in a row than there are places for what they upload, none of them waited for.
  std::vector<DeviceMatrix> outs;
  for (int i = 0; i < 10; ++i) outs.emplace_back(2, 9, DType::f32, stream());
  for (int i = 0; i < 10; ++i) {
    const std::vector<int32_t> ids = {i % 9, (i + 1) % 9};
    const std::vector<float> weights(2, static_cast<float>(i + 1));
    kernels().scatter_token_weights({ids, weights, 1, 0}, 9, outs[i].ref(), 1);
  }
  for (int i = 0; i < 10; ++i) {
    const Matrix got = outs[i].host();
    for (int64_t v = 0; v < 9; ++v) {
      EXPECT_EQ(got.at(0, v), v == i % 9 ? i + 1 : 0);
      EXPECT_EQ(got.at(1, v), v == (i + 1) % 9 ? i + 1 : 0);
    }
  }
}

TEST_P(CudaRowPasses, GradientsOfManyRowsAreThoseOfFew) {
  // Enough rows for two launches, whose constants arrive apart; none of the calls is waited for.
  constexpr int64_t rows = 4200, columns = 12, per_row = 2;
  const Case c(random_logits(rows, columns, DType::f32), per_row);
  const std::vector<RowNormalizer> normalizers = c.normalizers();
  const std::vector<GradientCoefficients> coefficients = c.coefficients();
  std::vector<float> weights = c.weights();
  DeviceMatrix logits(padded(c.rows, DType::f32).ref(), stream());
  const ConstMatrixRef all = std::as_const(logits).ref();
  const auto gradient = [&](int64_t begin, int64_t count, MatrixRef out) {
    const auto part = [&]<class T>(const std::vector<T>& of, int64_t n) {
      return std::span<const T>(of).subspan(begin * n, count * n);
    };
    kernels().gradient(all.rows_from(begin, count), c.pass(), part(normalizers, 1),
                       part(coefficients, 1),
                       {part(c.ids, per_row), part(weights, per_row), per_row, 0}, out);
  };
  std::vector<DeviceMatrix> many, few;
  for (int i = 0; i < 3; ++i) {
    for (auto* to : {&many, &few}) to->emplace_back(rows, all.cols, DType::f32, stream());
    gradient(0, rows, many[i].ref());
    for (int64_t begin = 0; begin < rows; begin += rows / 3)
      gradient(begin, rows / 3, few[i].ref().rows_from(begin, rows / 3));
    for (float& w : weights) w += 1;
  }
  for (int i = 0; i < 3; ++i) {
    const Matrix got = many[i].host(), want = few[i].host();
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t v = 0; v < all.cols; ++v)
        ASSERT_EQ(got.at(t, v), want.at(t, v)) << "call " << i << ", row " << t << ", column " << v;
  }
}

/// Scores of `rows` by one rank's records, twice: memory is reused, and the bits are the same.
std::vector<float> scores_of(RowKernels& kernels, Stream& stream, const LogitRows& rows,
                             const std::vector<int32_t>& ids) {
  const int64_t tokens = rows.tokens, per_row = std::ssize(ids) / tokens;
  DeviceMatrix logits(padded(rows, DType::f32).ref(), stream);
  const auto records = std::make_unique<ScoreRecords>(
      kernels,
      RecordShape{
          even_partition(rows.vocab_size, rows.vocab_size, 1), 0, per_row, {.weighted = true}});
  std::vector<float> first;
  for (int call = 0; call < 2; ++call) {
    std::vector<RowNormalizer> normalizers(tokens);
    std::vector<float> scores(tokens * (per_row + 1), nan_value);
    const std::span<float> all(scores);
    records->start(tokens, ids, {normalizers, all.first(tokens * per_row), all.last(tokens)});
    records->add(std::as_const(logits).ref(), 0, 0, rows.vocab_size);
    records->merge(world(), stream, "a test");
    if (call == 0) first = scores;
    EXPECT_EQ(scores, first);
  }
  return first;
}

TEST_P(CudaRowPasses, ScoresOfGroupsOfRowsAndOfRowsInParts) {
  // Groups of 256 and of 85 rows, of one row with more ids than threads, and rows of two parts.
  struct Shape {
    int64_t tokens, columns, per_row;
  };
  for (const auto& [tokens, columns, per_row] :
       {Shape{300, 9, 1}, {90, 20, 3}, {2, 40, 300}, {3, 33000, 2}}) {
    const LogitRows rows = random_logits(tokens, columns, DType::f32);
    const std::vector<int32_t> ids = mixed_ids(tokens, per_row, columns);
    const std::vector<float> got = scores_of(kernels(), stream(), rows, ids);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = t * per_row; k < (t + 1) * per_row; ++k)
        expect_logprob(got[k], score_row_reference(rows.row(t), ids[k]).logprob, "an id");
      expect_entropy(got[tokens * per_row + t], score_row_reference(rows.row(t), 0).entropy,
                     columns, "a row");
    }
  }
}

TEST(CudaRowKernels, OnlyADevicesStreamWillDo) {
  HostStream host;
  EXPECT_ANY_THROW(make_cuda_row_kernels(host));
}

}  // namespace gyre::test::row_kernels
