// Matrix products on the host: the suite of every backend, and what the host
// alone has.

#include <cstring>

#include "gemm_cases.hpp"

namespace gyre::test::gemm_suite {

GYRE_RUN_ON(host, Gemm);

TEST(HostGemm, RunsAndPanelsOfColumnsChangeNoBits) {
  std::mt19937 random(3);
  const int64_t m = 100, n = 3 * gemm_panel_columns + 5, k = 300;
  const Matrix a = numbers(m, k, DType::f32, random), b = numbers(k, n, DType::f32, random);
  for (const Variant variant : {Variant::plain, Variant::a_transposed, Variant::b_transposed}) {
    const Matrix of_a = stored_as(a, DType::f32, variant == Variant::a_transposed),
                 of_b = stored_as(b, DType::f32, variant == Variant::b_transposed);
    std::vector<float> whole(m * n), again = whole, parts = whole;
    host_gemm(variant, of_a.ref(), of_b.ref(), MatrixView(whole.data(), m, n), false);
    host_gemm(variant, of_a.ref(), of_b.ref(), MatrixView(again.data(), m, n), false);
    for (int64_t at = 0; at < n; at += 2 * gemm_panel_columns) {
      const int64_t count = std::min(2 * gemm_panel_columns, n - at);
      const auto panel = of_b.ref().as<float>();
      host_gemm(variant, of_a.ref(),
                variant == Variant::b_transposed ? panel.rows_from(at, count)
                                                 : panel.columns_from(at, count),
                MatrixView(parts.data(), m, n).columns_from(at, count), false);
    }
    EXPECT_EQ(0, std::memcmp(whole.data(), again.data(), whole.size() * sizeof(float)));
    EXPECT_EQ(0, std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)));
  }
}

TEST(HostGemm, ATransposedMatrixOfOneRowMayHaveAnyStride) {
  std::mt19937 random(4);
  const int64_t m = 3, k = 20;
  const Matrix a = numbers(m, k, DType::f32, random), b = numbers(1, k, DType::f32, random);
  const MatrixView<const float> row = b.ref().as<float>();
  std::vector<float> wanted(m), got(m);
  host_gemm(Variant::b_transposed, a.ref(), MatrixView(row.data, 1, k, 1),
            MatrixView(got.data(), m, 1), false);
  host_gemm(Variant::b_transposed, a.ref(), row, MatrixView(wanted.data(), m, 1), false);
  EXPECT_EQ(got, wanted);
}

TEST(GemmDouble, IsTheSumOfProductsWhateverTheShape) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  for (const auto& [m, k, n] : {std::array<int64_t, 3>{1, 1, 1},
                                {3, 300, 70},
                                {130, 64, 129},
                                {65, 257, 5},
                                {2, 0, 3},
                                {0, 4, 4}}) {
    std::vector<double> a(m * k), c(static_cast<size_t>(m * n), 0);
    std::vector<float> b(k * n);
    for (double& x : a) x = normal(random);
    for (float& x : b) x = static_cast<float>(normal(random));
    gemm(MatrixView<const double>(a.data(), m, k), MatrixView<const float>(b.data(), k, n),
         MatrixView<double>(c.data(), m, n));
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double want = 0;
        for (int64_t l = 0; l < k; ++l) want += a[i * k + l] * static_cast<double>(b[l * n + j]);
        ASSERT_NEAR(c[i * n + j], want, 1e-12 * (1 + static_cast<double>(k)))
            << m << " " << k << " " << n;
      }
  }
}

}  // namespace gyre::test::gemm_suite
