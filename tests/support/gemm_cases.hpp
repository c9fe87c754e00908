#pragma once
// Matrix products on every backend, against the reference. What lies between
// rows is NaN.

#include <array>
#include <utility>

#include "backend_test.hpp"
#include "close.hpp"
#include "device_matrix.hpp"
#include "runtime/cuda_gemm.hpp"
#include "runtime/gemm.hpp"

namespace gyre::test::gemm_suite {

/// Which operand of a product is transposed.
enum class Variant { plain, a_transposed, b_transposed, both_transposed };
inline constexpr std::array all_variants = {Variant::plain, Variant::a_transposed,
                                            Variant::b_transposed, Variant::both_transposed};

/// A product, and how its operands lie in memory. The host takes a and c in
/// f32, and at most one transposed operand.
struct Product {
  int64_t m = 0, n = 0, k = 0;
  Variant variant = Variant::plain;
  DType a = DType::f32, b = DType::f32, c = DType::f32;
  int64_t gap = 0;  ///< between rows
  bool accumulate = false;
};

/// Numbers that `type` holds, in f32.
inline Matrix numbers(int64_t rows, int64_t cols, DType type, std::mt19937& random) {
  Matrix x(rows, cols, DType::f32);
  std::normal_distribution<float> normal;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const float value = normal(random);
      x.set(r, c, static_cast<double>(type == DType::bf16 ? to_float(to_bf16(value)) : value));
    }
  return x;
}
inline Matrix stored_as(const Matrix& x, DType type, bool transposed = false) {
  Matrix to(transposed ? x.cols() : x.rows(), transposed ? x.rows() : x.cols(), type);
  for (int64_t r = 0; r < x.rows(); ++r)
    for (int64_t c = 0; c < x.cols(); ++c)
      to.set(transposed ? c : r, transposed ? r : c, x.at(r, c));
  return to;
}

/// The host's functions under the name of their variant.
inline void host_gemm(Variant variant, ConstMatrixRef a, ConstMatrixRef b, MatrixRef c,
                      bool accumulate) {
  const auto of_a = a.as<float>();
  const auto to = c.as<float>();
  if (variant == Variant::plain) gemm(of_a, b, to, accumulate);
  if (variant == Variant::a_transposed) gemm_a_transposed(of_a, b, to, accumulate);
  if (variant == Variant::b_transposed) gemm_b_transposed(of_a, b, to, accumulate);
}

class Gemm : public BackendTest {
 protected:
  using Function = decltype(&cuda_gemm);

  /// Checks each function of this backend.
  void check(const Product& p) {
    check_with(cuda_gemm, p);
#ifdef GYRE_WITH_CUBLAS
    if (!on_host()) check_with(cuda_gemm_plain, p);
#endif
  }

 private:
  void check_with(Function function, const Product& p) {
    const auto [m, n, k] = std::array{p.m, p.n, p.k};
    SCOPED_TRACE(testing::Message()
                 << m << " x " << n << " x " << k << ", variant " << static_cast<int>(p.variant)
                 << ' ' << name_of(p.a) << ' ' << name_of(p.b) << ' ' << name_of(p.c) << " gap "
                 << p.gap << (p.accumulate ? " accumulating" : ""));
    const bool at = p.variant == Variant::a_transposed || p.variant == Variant::both_transposed,
               bt = p.variant == Variant::b_transposed || p.variant == Variant::both_transposed;
    std::mt19937 random(7);
    const Matrix a = numbers(m, k, p.a, random), b = numbers(k, n, p.b, random);
    // What is not added to holds NaN: it may not be read.
    Matrix want = p.accumulate ? numbers(m, n, p.c, random) : Matrix(m, n, DType::f32), size = want;
    const DeviceMatrix a_there(stored_as(a, p.a, at).ref(), stream(), 3, p.gap),
        b_there(stored_as(b, p.b, bt).ref(), stream(), 3, 2 * p.gap);
    DeviceMatrix c_there(stored_as(want, p.c).ref(), stream(), 3, p.gap);
    if (on_host())
      host_gemm(p.variant, a_there.ref(), b_there.ref(), c_there.ref(), p.accumulate);
    else
      function(a_there.ref(), at ? Transpose::yes : Transpose::no, b_there.ref(),
               bt ? Transpose::yes : Transpose::no, c_there.ref(), p.accumulate, stream());
    const Matrix got = c_there.host();
    const MatrixView<const float> of_a = a.ref().as<float>(), of_b = b.ref().as<float>();
    const MatrixView<float> to = want.ref().as<float>(), sizes = size.ref().as<float>();
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        float sum = p.accumulate ? std::abs(to(i, j)) : 0;
        for (int64_t l = 0; l < k; ++l) sum += std::abs(of_a(i, l) * of_b(l, j));
        sizes(i, j) = sum;
      }
    gemm_reference(of_a, of_b, to, p.accumulate);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        // Stored in bf16, half a unit of it besides.
        const double stored = p.c == DType::bf16 ? 0x1p-8 * std::abs(want.at(i, j)) : 0;
        ASSERT_NEAR(got.at(i, j), want.at(i, j),
                    rounding(static_cast<double>(k)) * size.at(i, j) + stored)
            << "row " << i << " column " << j;
      }
  }
};

TEST_P(Gemm, MatchesTheReferenceForAllRemaindersOfTiles) {
  for (const int64_t m : pick<int64_t>({1, 2, 63, 64, 65, 200}, {1, 63, 65}))
    for (const int64_t n : pick<int64_t>({1, 15, 31, 40, 64, 65, 120, 192}, {1, 64, 77}))
      for (const int64_t k : pick<int64_t>({1, 3, 64, 257}, {1, 15, 33}))
        check({.m = m, .n = n, .k = k});
}

TEST_P(Gemm, TransposedOperandsTypesAndStrides) {
  for (const Variant variant : all_variants)
    for (const int64_t gap : {0, 3})
      for (const bool accumulate : {false, true}) {
        if (on_host() && variant == Variant::both_transposed) continue;
        for (const DType b : {DType::f32, DType::bf16}) {
          const DType a = on_host() ? DType::f32 : b;
          check({70, 9, 17, variant, a, b, DType::f32, gap, accumulate});
          if (!on_host() || accumulate != (gap > 0)) continue;
          for (const int64_t m : {1, 63, 64, 130})
            for (const auto& [n, k] : {std::pair{1, 65}, {15, 17}, {65, 300}, {77, 33}, {192, 257}})
              check({m, n, k, variant, a, b, DType::f32, gap, accumulate});
        }
        if (!on_host())
          check({70, 9, 17, variant, DType::bf16, DType::bf16, DType::bf16, gap, accumulate});
      }
}

TEST_P(Gemm, LongSums) {
  for (const auto& [m, n, k] : {std::array{5, 6, 1000}, {64, 64, 512}, {3, 10, 600}})
    check({.m = m, .n = n, .k = k, .accumulate = true});
}

TEST_P(Gemm, AnEmptySumIsZeroOrLeavesWhatWasThere) {
  for (const auto& [m, n, k] : {std::array{0, 5, 4}, {5, 0, 4}, {5, 4, 0}, {0, 0, 0}})
    for (const Variant variant : all_variants)
      for (const bool accumulate : {false, true})
        if (!on_host() || variant != Variant::both_transposed)
          check({.m = m, .n = n, .k = k, .variant = variant, .gap = 2, .accumulate = accumulate});
}

}  // namespace gyre::test::gemm_suite
