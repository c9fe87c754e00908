// Attention by a library into results that are fresh, and with the output of the forward pass at
// hand: against the double-precision reference, and which arrays the library is given.

#include <cmath>
#include <optional>
#include <vector>

#include "ragged_kernel_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test::ragged_kernel;

/// Results of which nothing is there before the call, and that cover all rows after it.
class FreshResultsGpu : public RaggedKernelGpu {
 protected:
  /// `m` as `type` with a gap, and `value` for NaN.
  static Matrix filled(const Matrix& m, DType type, int64_t gap, float value) {
    Matrix result(type, m.rows(), m.cols(), gap);
    for (int64_t r = 0; r < m.rows(); ++r)
      for (int64_t c = 0; c < m.cols(); ++c)
        result.set(r, c, std::isnan(m(r, c)) ? value : m(r, c));
    return result;
  }
  static Forward fresh(const Problem& p, int64_t gap) {
    return {{p.types.out, p.rows, p.d_out.cols(), gap}, {DType::f32, p.rows, p.heads.heads, gap}};
  }

  /// Whether the library's array of the last batch lies in `m`.
  bool is_in(ConstMatrixRef m, AttentionTensor id) {
    const auto* const address = static_cast<const std::byte*>(plain().last.at(id));
    return m.data <= address && address < m.data + m.rows * m.stride * size_of(m.type);
  }

  void check_forward(const Problem& p, int64_t gap, std::optional<bool> whole) {
    const Forward want = reference_forward(p);
    Forward got = fresh(p, gap);
    add(p, p.rectangles, got, true);
    if (whole && GetParam() == "plain") {
      const bool in_place = *whole && p.types.out == DType::bf16 && gap != 3;
      EXPECT_EQ(is_in(last_forward().out, AttentionTensor::out), in_place);
      EXPECT_EQ(is_in(MatrixRef(last_forward().lse), AttentionTensor::lse), in_place);
    }
    EXPECT_LE(worst_error(p, got,
                          {filled(want.out, DType::f32, gap, 0),
                           filled(want.lse, DType::f32, gap, -infinity)}),
              1);
  }

  /// With what the forward pass left, NaN in rows that are in no rectangle, or with delta alone.
  void check_backward(const Problem& p, int64_t gap, bool with_out, std::optional<bool> whole) {
    const Forward exact = reference_forward(p);
    const Forward of = {filled(exact.out, DType::bf16, gap, nan_value),
                        filled(exact.lse, DType::f32, gap, nan_value)};
    const Backward want = reference_backward(p, of);
    Backward got{{p.types.d_q, p.rows, p.q.cols(), gap}, {DType::f32, p.keys, p.kv.cols(), gap}};
    Wanted wanted;
    wanted.overwrite = true;
    wanted.with_out = with_out;
    add(p, p.rectangles, of, got, wanted);
    if (whole && GetParam() == "plain") {
      const BackwardBlock& block = last_backward();
      const bool d_q_in_place = *whole && p.types.d_q == DType::bf16 && gap != 3;
      EXPECT_EQ(is_in(block.out, AttentionTensor::out), with_out && gap != 3);
      EXPECT_EQ(is_in(block.lse, AttentionTensor::lse), with_out && gap != 3);
      EXPECT_EQ(is_in(block.d_q, AttentionTensor::d_q), d_q_in_place);
      EXPECT_EQ(asked_for_delta(), !with_out || gap == 3);
    }
    EXPECT_LE(
        worst_error(p, got,
                    {filled(want.d_q, DType::f32, gap, 0), filled(want.d_kv, DType::f32, gap, 0)}),
        1);
  }

  /// `whole`: the library takes all in one batch, and that has every query or has not.
  void check_fresh(const Problem& p, std::optional<bool> whole = {}) {
    for (const int64_t gap : {0, 8, 3}) {  // as the library may use them, and not
      SCOPED_TRACE(testing::Message() << "gap " << gap);
      check_forward(p, gap, whole);
      for (const bool with_out : {false, true}) {
        SCOPED_TRACE(with_out ? "with out" : "with delta");
        check_backward(p, gap, with_out, whole);
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Library, FreshResultsGpu, testing::ValuesIn(libraries()),
                         [](const auto& library) { return library.param; });

TEST_P(FreshResultsGpu, OneRectangle) {
  for (const Types types : {bf16_in, all_bf16}) {
    check_fresh(problem(heads_of(2, 1, head_dim()), 40, 40, {causal(0, 40, 0, 40, 0)}, types),
                true);
    check_fresh(problem(heads_of(2, 2, head_dim()), 40, 90, {full(3, 31, 20, 65)}, types), false);
  }
  if (has_gradients()) expect_library();
}

TEST_P(FreshResultsGpu, FarBehindTheBegin) {
  check_fresh(
      problem(heads_of(2, 1, head_dim()), 450, 300, {causal(400, 31, 200, 65, 34)}, all_bf16));
  if (has_gradients()) expect_library();
}

TEST_P(FreshResultsGpu, EntriesAtEqualDistances) {
  const std::vector<Rectangle> rectangles = {causal(4, 20, 1, 20, 0), causal(32, 20, 40, 20, 0),
                                             causal(60, 20, 79, 20, 0)};
  for (const Types types : {bf16_in, all_bf16})
    for (const int64_t kv_heads : {1, 4})
      check_fresh(problem(heads_of(4, kv_heads, head_dim()), 84, 100, rectangles, types), false);
  if (has_gradients()) expect_library();
}

TEST_P(FreshResultsGpu, SeveralBatchesThatShareRows) {
  const std::vector<Rectangle> rectangles = {full(0, 20, 0, 30), causal(10, 30, 30, 30, 0),
                                             full(30, 20, 70, 9), causal(60, 10, 0, 30, 20),
                                             causal(60, 10, 30, 12, 2)};
  for (const Types types : {bf16_in, all_bf16})
    check_fresh(problem(heads_of(2, 1, head_dim()), 80, 100, rectangles, types));
  if (has_gradients()) expect_library();
}

TEST_P(FreshResultsGpu, ManyRectanglesForEachRow) {
  std::vector<Rectangle> parts;  // more scratch rows than queries
  for (int64_t i = 0; i < 5; ++i) parts.push_back(full(0, 70, 5 * i, 4));
  check_fresh(problem(heads_of(1, 1, head_dim()), 70, 25, parts), false);
  if (has_gradients()) expect_library();
}

TEST_P(FreshResultsGpu, NotANumberInRowsOutsideDoesNotMatter) {
  const std::vector<Rectangle> rectangles = {causal(3, 17, 30, 19, 2), causal(25, 30, 55, 30, 0),
                                             full(60, 12, 2, 25)};
  check_fresh(problem(heads_of(2, 1, head_dim()), 80, 100, rectangles, all_bf16, false), false);
  if (has_gradients()) expect_library();
}

TEST_P(FreshResultsGpu, WhatIsThereIsKept) {
  // As aligned as what is fresh, but not that.
  const Problem p = problem(heads_of(2, 1, head_dim()), 40, 60, {full(0, 40, 0, 60)}, all_bf16);
  const Forward want = reference_forward(p);
  Forward got{filled(p.cleared().out, DType::bf16, 8, 0),
              filled(p.cleared().lse, DType::f32, 8, 0)};
  Backward gradients{filled(p.no_gradients().d_q, DType::bf16, 8, 0),
                     filled(p.no_gradients().d_kv, DType::f32, 8, 0)};
  for (const int64_t begin : {0, 30}) {
    const Rectangle part = full(0, 40, begin, 30);
    add(p, {&part, 1}, got);
    add(p, {&part, 1}, want, gradients);
  }
  const Backward want_gradients = reference_backward(p, want);
  EXPECT_LE(
      worst_error(p, got, {filled(want.out, DType::f32, 8, 0), filled(want.lse, DType::f32, 8, 0)},
                  2),
      1);
  EXPECT_LE(worst_error(p, gradients,
                        {filled(want_gradients.d_q, DType::f32, 8, 0),
                         filled(want_gradients.d_kv, DType::f32, 8, 0)},
                        2),
            1);
}

TEST_P(FreshResultsGpu, AllRowsInABatchThatIsFilledUp) {
  std::vector<Rectangle> rectangles;
  for (int64_t i = 0, row = 0; i < 10; row += 3 + i++)
    rectangles.push_back(causal(row, 3 + i, row, 3 + i, 0));
  check_fresh(problem(heads_of(2, 1, head_dim()), 75, 75, rectangles, all_bf16), false);
  if (has_gradients()) expect_library();
}

TEST_P(FreshResultsGpu, SomeOnReversedRows) {
  const std::vector<Rectangle> rectangles = {{0, 20, 0, 20, {}},
                                             {3, 520, 25, 520, {false, 0, 1, 1, 1}}};
  check_fresh(problem(heads_of(1, 1, head_dim()), 530, 550, rectangles, all_bf16));
  if (has_gradients()) expect_library();
}

TEST_P(FreshResultsGpu, SomeForTheTiledKernel) {
  const std::vector<Rectangle> rectangles = {full(0, 20, 0, 30), causal(10, 30, 30, 30, 0, 7),
                                             causal(50, 10, 65, 30, 20)};
  plain().refuses = [](const AttentionGraphShape& shape) {
    return shape.mask == RaggedMask::causal_end ? "no" : "";
  };
  check_fresh(problem(heads_of(2, 1, head_dim()), 80, 100, rectangles, all_bf16));
  check_fresh(problem(heads_of(2, 1, 24), 80, 100, rectangles, all_bf16));
}

}  // namespace GYRE_FILE
}  // namespace gyre
