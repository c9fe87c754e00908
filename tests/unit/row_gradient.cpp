// Gradients of rows on the host: the suites of every backend, and what the host alone has.

#include <cstring>

#include "row_transform_cases.hpp"

namespace gyre::test::row_kernels {

GYRE_RUN_ON(host, RowGradient);
GYRE_RUN_ON(host, RowTransform);

/// A matrix that begins `shift` elements into its memory, and large enough to be written past the
/// caches.
template <class T>
struct LargeMatrix {
  Buffer<T> memory;
  MatrixView<T> view;
  LargeMatrix(int64_t rows, int64_t cols, int64_t shift, int64_t stride)
      : memory(rows * stride + shift), view(memory.data() + shift, rows, cols, stride) {
    std::memset(static_cast<void*>(memory.data()), 0x7f,
                static_cast<size_t>(memory.size()) * sizeof(T));
  }
};

TEST(HostRowGradient, PlaceAndThreadsDoNotMatter) {
  const int64_t rows = 37, columns = 70001, kept = columns - 5;
  const Case c(random_logits(rows, kept, DType::bf16), 2);
  LargeMatrix<bf16> logits(rows, columns, 3, columns + 8);
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t v = 0; v < kept; ++v)
      logits.view(t, v) = to_bf16(static_cast<float>(c.rows.row(t)[v]));
  const std::vector<int32_t> ids = c.global_ids();
  const std::vector<float> weights = c.weights();
  const auto run = [&](MatrixRef out, int threads) {
    row_gradient(logits.view, c.pass(threads), c.normalizers(), c.coefficients(),
                 {ids, weights, c.per_row, c.first_column}, out);
  };
  LargeMatrix<bf16> first(rows, columns, 0, columns);
  run(first.view, 1);
  LargeMatrix<float> wide(rows, columns, 5, columns + 3), wide_aligned(rows, columns, 0, 70016);
  run(wide.view, 1);
  run(wide_aligned.view, 2);
  LargeMatrix<bf16> second(rows, columns, 17, columns + 1);
  run(second.view, 2);
  run(logits.view, 2);
  // Half of the last place of bf16, and what the f32 themselves may differ by.
  const double tolerance = epsilon_of(DType::bf16) / 2 + tolerance_for(DType::f32, row_roundings);
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t v = 0; v < columns; ++v) {
      ASSERT_EQ(first.view(t, v), second.view(t, v)) << t << ' ' << v;
      ASSERT_EQ(first.view(t, v), logits.view(t, v)) << t << ' ' << v;
      ASSERT_EQ(wide.view(t, v), wide_aligned.view(t, v)) << t << ' ' << v;
      ASSERT_NEAR(to_float(first.view(t, v)), wide.view(t, v),
                  tolerance * static_cast<double>(std::abs(wide.view(t, v))) + 0x1p-80);
    }
  EXPECT_EQ(second.memory[16].bits, 0x7f7f) << "nothing before the matrix is written";
  EXPECT_EQ(second.view(0, columns).bits, 0x7f7f) << "nor behind a row";
}

// The reference itself against finite differences of the scores.
TEST(HostRowGradient, ReferenceIsTheSlopeOfTheScores) {
  const LogitRows rows = random_logits(1, 12, DType::f32);
  const std::vector<int32_t> ids = {3, 11, 3};
  const std::vector<double> g = {0.7, -1.2, 0.4};
  const double h = 0.9, step = 1e-5;
  for (const double temperature : {0.6, 1.0, 2.5}) {
    const auto loss = [&](int64_t v, double move) {
      std::vector<double> row(rows.row(0).begin(), rows.row(0).end());
      row[v] += move;
      double sum = h * score_row_reference(row, -1, temperature).entropy;
      for (size_t k = 0; k < ids.size(); ++k)
        sum += g[k] * score_row_reference(row, ids[k], temperature).logprob;
      return sum;
    };
    const std::vector<double> gradient =
        score_gradient_reference(rows.row(0), ids, g, h, temperature);
    for (int64_t v = 0; v < 12; ++v)
      EXPECT_NEAR(gradient[v], (loss(v, step) - loss(v, -step)) / (2 * step), 1e-8);
  }
}

}  // namespace gyre::test::row_kernels
