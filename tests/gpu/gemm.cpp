// Matrix products on the device, by the library and by our own kernel. Without cuBLASLt both are
// our own.

#include "runtime/gemm.hpp"

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "close.hpp"
#include "gpu_test.hpp"
#include "runtime/cuda_gemm.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// A product, and how its operands lie in memory.
struct Case {
  int64_t m = 0, n = 0, k = 0;
  Transpose a_op = Transpose::no, b_op = Transpose::no;
  DType in = DType::f32, out = DType::f32;
  int64_t gap = 0;  ///< between rows
  bool accumulate = false;
  std::string text() const {
    return std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k) +
           (a_op == Transpose::yes ? " aᵀ" : "") + (b_op == Transpose::yes ? " bᵀ" : "") +
           (in == DType::bf16 ? " bf16" : "") + (out == DType::bf16 ? " to bf16" : "") + " gap " +
           std::to_string(gap) + (accumulate ? " accumulating" : "");
  }
};

class CudaGemm : public test::GpuTest {
 protected:
  using Function = decltype(&cuda_gemm);

  struct Operand {
    Buffer<std::byte> memory;
    MatrixRef ref;
  };

  /// `values` [rows, cols], transposed if asked, as `type` in rows with NaN gaps, behind and before
  /// which lie NaNs as well.
  Operand upload(const std::vector<float>& values, int64_t rows, int64_t cols, Transpose op,
                 DType type, int64_t gap) {
    if (op == Transpose::yes) std::swap(rows, cols);
    const int64_t stride = cols + gap, before = 3;
    std::vector<float> laid(static_cast<size_t>(before + rows * stride + 5), nan);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c)
        laid[static_cast<size_t>(before + r * stride + c)] =
            values[static_cast<size_t>(op == Transpose::yes ? c * rows + r : r * cols + c)];
    std::vector<std::byte> bytes(laid.size() * size_of(type));
    for (size_t i = 0; i < laid.size(); ++i) {
      const bf16 half = to_bf16(laid[i]);
      if (type == DType::f32)
        std::memcpy(&bytes[i * 4], &laid[i], 4);
      else
        std::memcpy(&bytes[i * 2], &half, 2);
    }
    Operand made{to_device<std::byte>(bytes), {}};
    made.ref = {made.memory.data() + before * static_cast<int64_t>(size_of(type)), type, rows, cols,
                stride};
    return made;
  }

  std::vector<float> download(const Operand& x) {
    const std::vector<std::byte> bytes = to_host(x.memory);
    std::vector<float> values(bytes.size() / size_of(x.ref.type));
    for (size_t i = 0; i < values.size(); ++i) {
      bf16 half;
      if (x.ref.type == DType::f32) {
        std::memcpy(&values[i], &bytes[i * 4], 4);
      } else {
        std::memcpy(&half, &bytes[i * 2], 2);
        values[i] = to_float(half);
      }
    }
    return values;
  }

  static std::vector<float> numbers(int64_t count, DType type, std::mt19937& random) {
    std::vector<float> values(static_cast<size_t>(count));
    test::fill_normal(values, random);
    if (type == DType::bf16)
      for (float& x : values) x = to_float(to_bf16(x));
    return values;
  }

  void check(Function gemm_function, const Case& test) {
    SCOPED_TRACE(test.text());
    std::mt19937 random(7);
    const auto [m, n, k] = std::array{test.m, test.n, test.k};
    const std::vector<float> a = numbers(m * k, test.in, random);
    const std::vector<float> b = numbers(k * n, test.in, random);
    std::vector<float> want = numbers(m * n, test.out, random);
    const Operand on_a = upload(a, m, k, test.a_op, test.in, test.gap);
    const Operand on_b = upload(b, k, n, test.b_op, test.in, 2 * test.gap);
    // What is not added to holds NaN: it may not be read.
    const std::vector<float> start = test.accumulate ? want : std::vector<float>(want.size(), nan);
    const Operand on_c = upload(start, m, n, Transpose::no, test.out, test.gap);

    gemm_function(on_a.ref, test.a_op, on_b.ref, test.b_op, on_c.ref, test.accumulate, stream());
    const std::vector<float> got = download(on_c);

    std::vector<float> size(want.size());
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        float sum = test.accumulate ? std::abs(want[static_cast<size_t>(i * n + j)]) : 0.0F;
        for (int64_t l = 0; l < k; ++l)
          sum += std::abs(a[static_cast<size_t>(i * k + l)] * b[static_cast<size_t>(l * n + j)]);
        size[static_cast<size_t>(i * n + j)] = sum;
      }
    gemm_reference({a.data(), m, k}, {b.data(), k, n}, {want.data(), m, n}, test.accumulate);
    expect_result(test, got, want, size);
  }

  void expect_result(const Case& test, const std::vector<float>& got,
                     const std::vector<float>& want, const std::vector<float>& size) {
    const int64_t stride = test.n + test.gap;
    std::vector<bool> written(got.size(), false);
    for (int64_t i = 0; i < test.m; ++i)
      for (int64_t j = 0; j < test.n; ++j) {
        const auto at = static_cast<size_t>(3 + i * stride + j);
        const auto of = static_cast<size_t>(i * test.n + j);
        written[at] = true;
        // Stored in bf16, half a unit of it besides.
        const double stored = test.out == DType::bf16 ? 0x1p-8 * std::abs(want[of]) : 0;
        EXPECT_NEAR(got[at], want[of],
                    test::rounding(static_cast<double>(test.k)) * size[of] + stored)
            << "row " << i << " column " << j;
      }
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(written[i] || std::isnan(got[i])) << "wrote outside, at " << i;
  }

  /// Both functions.
  void check(const Case& test) {
    check(cuda_gemm, test);
#ifdef GYRE_WITH_CUBLAS
    check(cuda_gemm_plain, test);
#endif
  }
};

constexpr std::array ops = {Transpose::no, Transpose::yes};

TEST_F(CudaGemm, MatchesTheReferenceForAllRemaindersOfTiles) {
  for (const int64_t m : {1, 63, 65})
    for (const int64_t n : {1, 64, 77})
      for (const int64_t k : {1, 15, 33}) check({.m = m, .n = n, .k = k});
}

TEST_F(CudaGemm, TransposedOperandsTypesAndStrides) {
  for (const Transpose a_op : ops)
    for (const Transpose b_op : ops)
      for (const int64_t gap : {0, 3})
        for (const bool accumulate : {false, true}) {
          Case test{70, 9, 17, a_op, b_op, DType::f32, DType::f32, gap, accumulate};
          check(test);
          test.in = DType::bf16;
          check(test);
          test.out = DType::bf16;
          check(test);
        }
}

TEST_F(CudaGemm, LongSums) {
  check({.m = 5, .n = 6, .k = 1000, .accumulate = true});
}

TEST_F(CudaGemm, AnEmptySumIsZeroOrLeavesWhatWasThere) {
  for (const bool accumulate : {false, true}) {
    check({.m = 5, .n = 4, .k = 0, .gap = 2, .accumulate = accumulate});
    check({.m = 0, .n = 4, .k = 3, .gap = 2, .accumulate = accumulate});
    check({.m = 5, .n = 0, .k = 3, .gap = 2, .accumulate = accumulate});
  }
}

TEST_F(CudaGemm, ShapesThatDoNotFitAreAUsageError) {
  Buffer<float> x(64, MemorySpace::device);
  EXPECT_THROW(cuda_gemm(x.matrix(2, 3), Transpose::no, x.matrix(4, 5), Transpose::no,
                         x.matrix(2, 5), false, stream()),
               Error);
}

}  // namespace GYRE_FILE
}  // namespace gyre
