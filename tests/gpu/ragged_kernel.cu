// Attention by a library over ragged batches against the double-precision reference, and that it is
// the library's: what it refuses would go to the tiled kernel, and pass. The libraries: a plain
// one, which runs everywhere, and cuDNN where it is. Outputs of rows that no rectangle covers are
// NaN and have to stay so; inputs there are numbers, except where a test says otherwise.

#include <cuda_runtime_api.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "attention/kernels/cuda_ragged_kernel.hpp"
#include "attention/kernels/cudnn_kernel.hpp"
#include "attention_kernel_cases.hpp"
#include "plain_attention.cuh"
#include "runtime/cuda_check.hpp"

namespace gyre {
namespace {

using namespace test::attention_kernel;

/// With the plain library.
class PlainKernelGpu : public KernelTest {
 protected:
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
    return make_ragged_kernel(stream, test::make_plain_attention(stream, plain_));
  }
  void TearDown() override {
    if (plain_.dropped.size() == 0) return;  // skipped, or another library
    EXPECT_EQ(to_host(plain_.dropped)[0], 0) << "rows that the library did not reach";
  }
  test::PlainAttention& plain() { return plain_; }

 private:
  test::PlainAttention plain_;
};

/// With each library.
class RaggedKernelGpu : public PlainKernelGpu, public testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
#ifdef GYRE_WITH_CUDNN
    std::string why;
    if (!is_plain() && cudnn_version(&why).empty()) GTEST_SKIP() << why;
#endif
    KernelTest::SetUp();
  }
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
#ifdef GYRE_WITH_CUDNN
    if (!is_plain()) return make_cudnn_kernel(stream);
#endif
    return PlainKernelGpu::make_kernel(stream);
  }

  static bool is_plain() {
    return GetParam() == "plain";
  }
  /// cuDNN's is one that it surely has.
  static int64_t head_dim() {
    return is_plain() ? 16 : 64;
  }

  void expect_library() {
    EXPECT_EQ(kernel().note().find("tiled kernel"), std::string::npos) << kernel().note();
  }
  /// Whether the library has gradients of ragged batches for this device.
  static bool has_gradients() {
    int device = 0, major = 0;
    GYRE_CHECK_CUDA(cudaGetDevice(&device));
    GYRE_CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return is_plain() || major >= 9;
  }

  /// The library against the reference, forward and backward.
  void check_library(const Problem& p) {
    const Forward want = reference_forward(p);
    EXPECT_LE(worst_error(p, forward(p), want), 1) << "forward, share of the tolerance";
    expect_library();
    const Backward got = backward(p, want);
    EXPECT_LE(worst_error(p, got, reference_backward(p, want)), 1)
        << "backward, share of the tolerance";
    if (has_gradients()) expect_library();
  }
};

std::vector<std::string> libraries() {
#ifdef GYRE_WITH_CUDNN
  return {"plain", "cudnn"};
#else
  return {"plain"};
#endif
}
INSTANTIATE_TEST_SUITE_P(Library, RaggedKernelGpu, testing::ValuesIn(libraries()),
                         [](const auto& library) { return library.param; });

/// A problem for a library; `outside`: inputs that no rectangle covers are numbers, not NaN.
Problem problem(BlockHeads heads, int64_t rows, int64_t keys, std::vector<Rectangle> rectangles,
                Types types = bf16_in, bool outside = true) {
  Problem p(heads, rows, keys, std::move(rectangles), types);
  p.narrow_partials = true;
  if (outside) {
    std::mt19937 random(77);
    for (Matrix* input : {&p.q, &p.kv, &p.d_out}) input->fill(0, input->rows(), random);
  }
  return p;
}

/// Queries of each length against keys of each length, every one at rows of its own with a gap
/// behind it.
struct Lengths {
  std::vector<Rectangle> rectangles;
  int64_t rows = 2, keys = 1;
  void add(int64_t q_length, int64_t k_length, Mask mask = {}) {
    rectangles.push_back({LocalToken(rows), q_length, LocalToken(keys), k_length, mask});
    rows += q_length + 3;
    keys += k_length + 2;
  }
  Problem problem(BlockHeads heads, Types types = bf16_in, bool outside = true) const {
    return gyre::problem(heads, rows, keys, rectangles, types, outside);
  }
};
constexpr int64_t around_tiles[] = {1, 65, 129};

TEST_P(RaggedKernelGpu, FullMasks) {
  for (const int64_t keys : around_tiles) {
    SCOPED_TRACE(keys);
    Lengths lengths;  // 3 entries of a batch of 4
    for (const int64_t rows : around_tiles) lengths.add(rows, keys);
    check_library(lengths.problem(heads_of(2, 1, head_dim())));
  }
}

TEST_P(RaggedKernelGpu, CausalSquares) {
  Lengths lengths;
  for (const int64_t length : around_tiles) lengths.add(length, length, {true, 0});
  for (const Types types : {bf16_in, all_bf16})
    check_library(lengths.problem(heads_of(2, 1, head_dim()), types));
}

TEST_P(RaggedKernelGpu, CausalEnds) {
  for (const int64_t more : {1, 64, 127}) {
    SCOPED_TRACE(more);
    Lengths lengths;
    for (const int64_t length : around_tiles)
      lengths.add(length, length + more, {true, more});  // of the last query: all keys
    check_library(lengths.problem(heads_of(2, 1, head_dim())));
  }
}

TEST_P(RaggedKernelGpu, DiagonalsThatBeginOrEndInside) {
  // Queries that see nothing, a diagonal, and queries that see all: up to two entries for each.
  for (const int64_t offset : {-120, -64, -17, 0, 63, 99, 200}) {
    SCOPED_TRACE(offset);
    check_library(problem(heads_of(2, 1, head_dim()), 200, 140, {causal(3, 190, 2, 130, offset)}));
  }
}

TEST_P(RaggedKernelGpu, OneEntryFarBehindTheBegin) {
  for (const int64_t offset : {0, 100}) {
    SCOPED_TRACE(offset);
    check_library(problem(heads_of(2, 1, head_dim()), 50310, 20410,
                          {causal(50000, 300, 20000, 300 + offset, offset)}));
  }
}

TEST_P(RaggedKernelGpu, KeysThatDescendAndOverlap) {
  // The last rectangle is not the one that ends last, and keys are shared by up to three.
  check_library(problem(heads_of(2, 1, head_dim()), 300, 420,
                        {full(0, 64, 260, 150), full(64, 70, 200, 129), full(134, 65, 130, 140),
                         full(199, 100, 5, 200)}));
}

TEST_P(RaggedKernelGpu, SeveralRectanglesForTheSameRows) {
  check_library(problem(heads_of(2, 1, head_dim()), 130, 400,
                        {full(0, 130, 0, 70), causal(0, 130, 150, 130, 0), full(50, 60, 80, 65),
                         full(60, 1, 380, 20), causal(120, 10, 360, 20, -3)}));
}

TEST_P(RaggedKernelGpu, ScoresFarBelowZero) {
  // Tiles of keys are longer than 64, and 192 is one and a half. All scores are near -100: a key
  // that is not there, with a score of 0, would weigh exp(90), which is infinite in f32.
  for (const int64_t keys : {64, 192}) {
    SCOPED_TRACE(keys);
    Problem p = problem(heads_of(2, 1, 64), 70, keys, {full(0, 70, 0, keys)});
    constexpr float shift = 3.5F, spread = 0.25F;
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < p.q.cols(); ++c) p.q.set(r, c, shift + spread * p.q(r, c));
    for (int64_t r = 0; r < p.keys; ++r)
      for (int64_t c = 0; c < p.kv_width(); ++c) p.kv.set(r, c, -shift + spread * p.kv(r, c));
    p.magnified = 100;
    p.gradient_term = shift;
    EXPECT_LT(reference_forward(p).lse(0, 0), -std::log(std::numeric_limits<float>::max()));
    check_library(p);
  }
}

TEST_P(RaggedKernelGpu, GroupedQueries) {
  Lengths lengths;
  for (const int64_t length : {65, 129}) lengths.add(length, length, {true, 0});
  for (const auto& [heads, kv_heads] : {std::pair{4, 4}, {4, 2}, {6, 2}, {5, 1}}) {
    SCOPED_TRACE(testing::Message() << heads << " heads over " << kv_heads);
    check_library(lengths.problem(heads_of(heads, kv_heads, head_dim())));
  }
  check_library(lengths.problem({3, 1, head_dim(), 8, 5, 0.25F}));  // the last heads of a group
}

TEST_P(RaggedKernelGpu, HeadDimensions) {
  Lengths lengths;
  for (const int64_t length : {65, 129}) lengths.add(length, length + 64, {true, 64});
  const std::vector<int64_t> dims =
      is_plain() ? std::vector<int64_t>{32, 80} : std::vector<int64_t>{64, 96, 128};
  for (const int64_t dim : dims) {
    SCOPED_TRACE(dim);
    check_library(lengths.problem(heads_of(2, 1, dim)));
  }
}

TEST_P(RaggedKernelGpu, NotANumberInRowsOutsideDoesNotMatter) {
  Lengths whole, squares, ends;
  for (const int64_t length : around_tiles) {
    whole.add(length, length);
    squares.add(length, length, {true, 0});
    ends.add(length, length + 64, {true, 64});
  }
  for (const Lengths& lengths : {whole, squares, ends})
    check_library(lengths.problem(heads_of(2, 1, head_dim()), bf16_in, false));
}

TEST_P(RaggedKernelGpu, CallsForPartsOfTheKeysAreOne) {
  for (const Types types : {bf16_in, all_bf16}) {
    check_in_parts(problem(heads_of(2, 1, head_dim()), 70, 200, {full(0, 70, 0, 200)}, types));
    if (has_gradients()) expect_library();
  }
}

TEST_P(RaggedKernelGpu, NarrowArraysAreSaidToBeRoundedTo) {
  for (const DType type : {DType::bf16, DType::f32}) {
    const KernelPrecision precision = kernel().precision(type);
    EXPECT_EQ(precision.narrow_weights, type == DType::bf16);
    EXPECT_EQ(precision.narrow_results, type == DType::bf16);
  }
}

TEST_P(RaggedKernelGpu, SeveralBatchesOfACall) {
  // Three masks; entries of up to 512 queries and of more.
  Lengths lengths;
  for (const int64_t rows : {65, 513}) {
    lengths.add(rows, 20);
    lengths.add(rows, rows, {true, 0});
    lengths.add(rows, rows + 7, {true, 7});
  }
  Problem p = lengths.problem(heads_of(1, 1, head_dim()), all_bf16);
  p.narrow_partials = false;  // one for each row, no more than is rounded anyway
  check_library(p);
  EXPECT_TRUE(!is_plain() || (plain().forward.executed == 6 && plain().backward.executed == 6));
}

TEST_P(RaggedKernelGpu, AsManyRowsAsTwiceTheQueriesAreABatch) {
  std::vector<Rectangle> parts;
  for (int64_t i = 0; i < 5; ++i) parts.push_back(full(0, 70, 4 * i, 4));
  check_library(problem(heads_of(1, 1, head_dim()), 70, 20, parts));
  EXPECT_TRUE(!is_plain() || (plain().forward.executed == 3 && plain().backward.executed == 3));
}

TEST_P(RaggedKernelGpu, MoreEntriesThanABatchTakes) {
  std::vector<Rectangle> rows;
  for (int64_t i = 0; i < 1030; ++i) rows.push_back(full(i, 1, 1029 - i, 1));
  Problem p = problem(heads_of(1, 1, head_dim()), 1030, 1030, rows);
  p.narrow_partials = false;
  check_library(p);
  EXPECT_TRUE(!is_plain() || (plain().forward.executed == 2 && plain().backward.executed == 2));
}

TEST_P(RaggedKernelGpu, TheSameBitsInEveryRun) {
  // Rows of queries, and of keys, that three entries share.
  const Problem p = problem(heads_of(2, 1, head_dim()), 70, 110,
                            {full(0, 70, 0, 30), full(0, 60, 30, 50), full(0, 50, 80, 30),
                             full(50, 20, 80, 30), full(60, 10, 40, 30)},
                            all_bf16);
  const Forward first = forward(p);
  const Backward gradients = backward(p, first);
  if (!kernel().note().empty()) GTEST_SKIP() << kernel().note();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(forward(p), first);
    EXPECT_EQ(backward(p, first), gradients);
  }
}

TEST_P(RaggedKernelGpu, GradientsThatAreNotWantedStay) {
  const Problem p =
      problem(heads_of(2, 1, head_dim()), 40, 90, {full(0, 40, 0, 50), causal(3, 37, 50, 40, 3)});
  const Forward of = reference_forward(p);
  const Backward all = reference_backward(p, of), none = p.no_gradients();
  EXPECT_LE(worst_error(p, backward(p, of, {true, false}), {all.d_q, none.d_kv}), 1);
  EXPECT_LE(worst_error(p, backward(p, of, {false, true}), {none.d_q, all.d_kv}), 1);
  EXPECT_EQ(backward(p, of, {false, false}), none);
}

TEST_P(RaggedKernelGpu, RowsThatSawNothingHaveNoGradient) {
  const Problem p = problem(heads_of(2, 1, head_dim()), 20, 30, {full(0, 20, 0, 30)});
  Forward of = reference_forward(p);
  for (const int64_t row : {0, 7, 19}) of.lse.fill_row(row, -infinity);
  of.lse.set(11, 1, -infinity);
  const Backward want = reference_backward(p, of);
  EXPECT_EQ(want.d_q(7, 0), 0);
  EXPECT_LE(worst_error(p, backward(p, of), want), 1);
}

TEST_P(RaggedKernelGpu, NoRectanglesAndRectanglesWithoutAPair) {
  Problem p = problem(heads_of(2, 1, head_dim()), 10, 10, {full(0, 10, 0, 10)});
  p.rectangles = {causal(0, 5, 0, 10, -5), full(5, 5, 3, 0)};
  check_library(p);
  p.rectangles.clear();
  check_library(p);
  EXPECT_EQ(kernel().note(), "");
}

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
    return {{p.types.out, p.rows, p.q.cols(), gap}, {DType::f32, p.rows, p.heads.heads, gap}};
  }

  void check_forward(const Problem& p, int64_t gap, std::optional<bool> whole) {
    const Forward want = reference_forward(p);
    Forward got = fresh(p, gap);
    const There q = send(p.q), kv = send(p.kv), out = send(got.out), lse = send(got.lse);
    ForwardBlock block;
    p.fill(block, q.ref, kv.ref, p.rectangles);
    block.out = out.ref;
    block.lse = lse.ref.as<float>();
    block.fresh = true;
    kernel().forward(block);
    if (whole && is_plain()) {
      const bool in_place = *whole && p.types.out == DType::bf16 && gap != 3;
      EXPECT_EQ(plain().last.at(AttentionTensor::out) == out.ref.data, in_place);
      EXPECT_EQ(plain().last.at(AttentionTensor::lse) == lse.ref.data, in_place);
    }
    fetch(out, got.out);
    fetch(lse, got.lse);
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
    const There q = send(p.q), kv = send(p.kv), d_out = send(p.d_out), out = send(of.out),
                lse = send(of.lse), delta = send(p.delta_of(of)), d_q = send(got.d_q),
                d_kv = send(got.d_kv);
    BackwardBlock block;
    p.fill(block, q.ref, kv.ref, p.rectangles);
    block.d_out = d_out.ref;
    block.lse = lse.ref.as<float>();
    block.delta = delta.ref.as<float>();
    if (with_out) block.out = out.ref;
    block.d_q = d_q.ref;
    block.d_k = d_kv.ref.as<float>().columns_from(0, p.kv_width());
    block.d_v = d_kv.ref.as<float>().columns_from(p.kv_width(), p.kv_width());
    block.fresh_d_q = block.fresh_d_kv = true;
    kernel().backward(block);
    if (whole && is_plain()) {
      const bool d_q_in_place = *whole && p.types.d_q == DType::bf16 && gap != 3;
      EXPECT_EQ(plain().last.at(AttentionTensor::out) == out.ref.data, with_out && gap != 3);
      EXPECT_EQ(plain().last.at(AttentionTensor::lse) == lse.ref.data, with_out && gap != 3);
      EXPECT_EQ(plain().last.at(AttentionTensor::d_q) == d_q.ref.data, d_q_in_place);
    }
    fetch(d_q, got.d_q);
    fetch(d_kv, got.d_kv);
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
  for (int64_t i = 0; i < 5; ++i) parts.push_back(full(0, 70, 4 * i, 4));
  check_fresh(problem(heads_of(1, 1, head_dim()), 70, 20, parts), false);
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

TEST_P(FreshResultsGpu, SomeForTheTiledKernel) {
  const std::vector<Rectangle> rectangles = {full(0, 20, 0, 30), causal(10, 30, 30, 30, 0, 7),
                                             causal(50, 10, 65, 30, 20)};
  plain().refuses = [](const AttentionGraphShape& shape) {
    return shape.mask == RaggedMask::causal_end ? "no" : "";
  };
  check_fresh(problem(heads_of(2, 1, head_dim()), 80, 100, rectangles, all_bf16));
  check_fresh(problem(heads_of(2, 1, 24), 80, 100, rectangles, all_bf16));
}

/// Calls that the library cannot take any part of, and rectangles that are no entries.
struct ForTheTiledKernel {
  std::string name, reason;
  Problem problem;
};
void PrintTo(const ForTheTiledKernel& x, std::ostream* out) {
  *out << x.name;
}

/// `m` with another gap between its rows.
Matrix with_gap(const Matrix& m, int64_t gap) {
  Matrix result(m.type(), m.rows(), m.cols(), gap);
  for (int64_t r = 0; r < m.rows(); ++r)
    for (int64_t c = 0; c < m.cols(); ++c) result.set(r, c, m(r, c));
  return result;
}

std::vector<ForTheTiledKernel> for_the_tiled_kernel() {
  const BlockHeads heads = heads_of(2, 1, 16);
  const std::vector<Rectangle> both = {causal(0, 20, 0, 25, 5), full(20, 13, 3, 22)};
  const auto p = [&](BlockHeads h) { return problem(h, 33, 25, both); };
  std::vector<ForTheTiledKernel> cases = {
      {"F32Arrays", "f32 arrays", problem(heads, 33, 25, both, all_f32)},
      {"OddHeadDim", "head_dim not a multiple of 16", p(heads_of(2, 1, 24))},
      {"LastHeadsOfGroups", "parts of head groups", p({6, 2, 16, 4, 2, 0.25F})},
      {"FirstHeadsOfGroups", "parts of head groups", p({6, 2, 16, 4, 0, 0.25F})},
      {"Queries", "rows that are not 16-byte aligned", p(heads)},
      {"Keys", "rows that are not 16-byte aligned", p(heads)},
      {"FixedTiles", "bits that do not depend on the batch", p(heads)},
      {"Windows", "window",
       problem(heads, 33, 25, {causal(0, 20, 0, 25, 5, 4), causal(20, 13, 3, 22, 15, 15)})},
      {"Strides", "unequal strides",
       problem(heads, 33, 25,
               {causal(0, 20, 0, 25, 5, 0, 2, 1), causal(20, 13, 3, 22, 7, 0, 3, 5)})}};
  cases[4].problem.q = with_gap(cases[4].problem.q, 4);
  cases[5].problem.kv = with_gap(cases[5].problem.kv, 4);
  cases[6].problem.fixed_tiles = true;
  return cases;
}

class TiledKernelGpu : public PlainKernelGpu,
                       public testing::WithParamInterface<ForTheTiledKernel> {};
INSTANTIATE_TEST_SUITE_P(Takes, TiledKernelGpu, testing::ValuesIn(for_the_tiled_kernel()),
                         [](const auto& x) { return x.param.name; });

TEST_P(TiledKernelGpu, InBothDirections) {
  check(GetParam().problem);
  EXPECT_EQ(kernel().note(), "tiled kernel for 4 of 4 rectangles (" + GetParam().reason + ")");
  EXPECT_EQ(plain().forward.asked + plain().backward.asked, 0);
}

TEST_F(PlainKernelGpu, OnlyTheBackwardPassReadsGradients) {
  Problem p = problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)});
  p.d_out = with_gap(p.d_out, 4);
  check(p);
  EXPECT_EQ(kernel().note(),
            "tiled kernel for 1 of 2 rectangles (rows that are not 16-byte aligned)");
  EXPECT_EQ(plain().forward.executed, 1);
}

TEST_F(PlainKernelGpu, ArraysThatBeginBetweenAlignedAddresses) {
  const Problem p = problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)});
  // `columns` of m, 8 bytes behind an aligned address or none.
  const auto shifted = [&](const Matrix& m, int64_t begin, int64_t columns, bool off) {
    const int64_t lead = off ? 4 : 0;
    Matrix wide(m.type(), m.rows(), columns + 8, 0);
    for (int64_t r = 0; r < m.rows(); ++r)
      for (int64_t c = 0; c < columns; ++c) wide.set(r, lead + c, m(r, begin + c));
    There there = send(wide);
    there.ref = there.ref.columns_from(lead, columns);
    return there;
  };
  for (const int array : {0, 1, 2}) {
    const There q = shifted(p.q, 0, p.q.cols(), array == 0),
                k = shifted(p.kv, 0, p.kv_width(), array == 1),
                v = shifted(p.kv, p.kv_width(), p.kv_width(), array == 2);
    Forward got = p.cleared();
    const There out = send(got.out), lse = send(got.lse);
    ForwardBlock block;
    p.fill(block, q.ref, k.ref, p.rectangles);
    block.k = k.ref;
    block.v = v.ref;
    block.out = out.ref;
    block.lse = lse.ref.as<float>();
    kernel().forward(block);
    fetch(out, got.out);
    fetch(lse, got.lse);
    EXPECT_LE(worst_error(p, got, reference_forward(p)), 1);
  }
  EXPECT_EQ(kernel().note(),
            "tiled kernel for 3 of 3 rectangles (rows that are not 16-byte aligned)");
}

TEST_F(PlainKernelGpu, SomeRectanglesOfACallAreForTheTiledKernel) {
  // Some of them are of the same rows.
  Problem p =
      problem(heads_of(2, 1, 16), 100, 200,
              {full(0, 40, 0, 50), causal(10, 60, 60, 70, 5, 12), causal(20, 33, 140, 33, 0),
               causal(30, 50, 180, 20, 2, 0, 1, 3), causal(70, 30, 0, 30, 0)});
  int64_t progress = 0;
  p.progress = [&] { ++progress; };
  check(p);
  EXPECT_EQ(kernel().note(), "tiled kernel for 4 of 10 rectangles (unequal strides, window)");
  EXPECT_EQ(plain().forward.executed, 2);
  EXPECT_EQ(plain().backward.executed, 2);
  EXPECT_GE(progress, 4);  // at least once for each batch
}

TEST_F(PlainKernelGpu, RefusedBatches) {
  const std::string why(100, 'x');
  plain().refuses = [&](const AttentionGraphShape& shape) {
    return shape.mask == RaggedMask::causal_end ? why : "";
  };
  const Problem p = problem(heads_of(2, 1, 16), 90, 100,
                            {full(0, 20, 0, 30), causal(20, 33, 30, 33, 0),
                             causal(60, 10, 70, 30, 20), causal(75, 15, 0, 30, 15)});
  check(p);
  EXPECT_EQ(kernel().note(),
            "tiled kernel for 4 of 8 rectangles (refused by plain: " + why.substr(0, 80) + ")");
  const auto calls = [](const test::PlainAttention::Calls& x) {
    return std::vector<int64_t>{x.asked, x.built, x.executed};
  };
  EXPECT_EQ(calls(plain().forward), (std::vector<int64_t>{3, 2, 2}));
  EXPECT_EQ(calls(plain().backward), (std::vector<int64_t>{4, 2, 2}));  // with and without order
  check(p);  // nothing is asked twice, also not what was refused
  EXPECT_EQ(calls(plain().forward), (std::vector<int64_t>{3, 2, 4}));
  EXPECT_EQ(calls(plain().backward), (std::vector<int64_t>{4, 2, 4}));
  EXPECT_NE(kernel().note().find("8 of 16 rectangles"), std::string::npos) << kernel().note();
}

TEST_F(PlainKernelGpu, RefusedAmongOthers) {
  // What the tiled kernel gets is in the order of the queries.
  plain().refuses = [](const AttentionGraphShape& shape) {
    return shape.mask == RaggedMask::full ? "no" : "";
  };
  const Problem p =
      problem(heads_of(2, 1, 16), 200, 300,
              {full(0, 40, 0, 50), causal(10, 60, 60, 70, 5, 12), full(20, 50, 140, 33),
               causal(70, 66, 200, 66, 0, 9), full(130, 66, 3, 50)});
  check(p);
  EXPECT_EQ(kernel().note(), "tiled kernel for 10 of 10 rectangles (refused by plain: no, window)");
}

TEST_F(PlainKernelGpu, RefusedGradients) {
  plain().refuses = [](const AttentionGraphShape& shape) {
    return !shape.backward ? "" : shape.deterministic ? "ordered" : "anything";
  };
  check(problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)}));
  EXPECT_EQ(kernel().note(), "tiled kernel for 1 of 2 rectangles (refused by plain: anything)");
  EXPECT_EQ(plain().forward.executed, 1);
}

TEST_F(PlainKernelGpu, GradientsInNoFixedOrderAreTold) {
  plain().ordered_gradients = false;
  const Problem p = problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)});
  forward(p);
  EXPECT_EQ(kernel().note(), "");
  check(p);
  EXPECT_EQ(kernel().note(), "plain's dQ is summed in no fixed order");
  check(problem(heads_of(2, 1, 24), 20, 30, {full(0, 20, 0, 30)}));
  EXPECT_EQ(kernel().note(),
            "tiled kernel for 2 of 5 rectangles (head_dim not a multiple of 16); "
            "plain's dQ is summed in no fixed order");
  EXPECT_EQ(plain().backward.executed, 1);
}

TEST_F(PlainKernelGpu, AFixedOrderMayCostWorkspace) {
  const Problem p = problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)});
  plain().ordered_extra_bytes = 1 << 20;
  check(p);
  EXPECT_EQ(kernel().note(), "");
  EXPECT_EQ(plain().backward.ordered, 1);
}

TEST_F(PlainKernelGpu, AFixedOrderMayNotCostAGibibyte) {
  const Problem p = problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)});
  plain().ordered_extra_bytes = 1 << 30;
  check(p);
  EXPECT_EQ(kernel().note(), "plain's dQ is summed in no fixed order");
  EXPECT_EQ(plain().backward.executed, 1);
  EXPECT_EQ(plain().backward.ordered, 0);
}

TEST_F(PlainKernelGpu, AFixedOrderIsTakenWhereThereIsNoOther) {
  plain().refuses = [](const AttentionGraphShape& shape) -> std::string {
    return shape.backward && !shape.deterministic ? "no order" : "";
  };
  plain().ordered_extra_bytes = 1 << 30;
  check(problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)}));
  EXPECT_EQ(kernel().note(), "");
  EXPECT_EQ(plain().backward.ordered, 1);
}

/// Call after call, each with its own rectangles; what is kept of them must be told apart.
class KeptPlansGpu : public PlainKernelGpu {
 protected:
  static Problem with(std::vector<Rectangle> rectangles, BlockHeads heads = heads_of(2, 1, 16)) {
    return problem(heads, 80, 300, std::move(rectangles));
  }
  void expect_built(int64_t graphs) {
    EXPECT_EQ(plain().forward.built, graphs);
    EXPECT_EQ(plain().backward.built, graphs);
  }
  /// Where the lengths of the last call were.
  const void* tables() { return plain().last.at(AttentionTensor::q_lengths); }
};

TEST_F(KeptPlansGpu, TheSameRectanglesHaveTheSameTablesAndGraphs) {
  const Problem one = with({full(0, 20, 0, 30)}), two = with({full(3, 31, 50, 25)});
  check(one);
  expect_built(1);
  const void* gradients = tables();
  forward(one);
  const void* first = tables();
  check(two);  // of the same limits
  expect_built(1);
  EXPECT_NE(tables(), gradients);
  check(one);
  expect_built(1);
  EXPECT_EQ(tables(), gradients);
  forward(one);
  EXPECT_EQ(tables(), first);
  EXPECT_EQ(plain().forward.executed, 5);
  EXPECT_EQ(plain().backward.executed, 3);
}

TEST_F(KeptPlansGpu, OtherRectangles) {
  const Rectangle one = full(0, 20, 0, 30), two = full(20, 20, 30, 30);
  for (const std::vector<Rectangle>& rectangles : std::vector<std::vector<Rectangle>>{
           {one}, {one, two}, {one}, {two}, {causal(0, 20, 0, 30, 10)}, {one}})
    check(with(rectangles));
  expect_built(3);  // batches of two and of one, and another mask
}

TEST_F(KeptPlansGpu, ThreeEntriesAreABatchOfFour) {
  std::vector<Rectangle> rectangles;
  for (int64_t i = 0; i < 4; ++i) rectangles.push_back(full(20 * i, 20, 30 * i, 30));
  check(with(rectangles));
  rectangles.pop_back();
  check(with(rectangles));
  expect_built(1);
}

TEST_F(KeptPlansGpu, TheFirstOfTheRectangles) {
  const Rectangle one = full(0, 20, 0, 30), two = full(20, 20, 30, 30);
  const Problem both = with({one, two});
  check(both);
  Forward got = both.cleared();
  add(both, {&one, 1}, got);
  for (int64_t row = 0; row < 40; ++row) {
    EXPECT_EQ(got.lse(row, 1) == -infinity, row >= 20) << row;
    EXPECT_EQ(got.out(row, 5) == 0, row >= 20) << row;
  }
}

TEST_F(KeptPlansGpu, OtherLimits) {
  check(with({full(0, 20, 0, 30)}));
  check(with({full(0, 20, 0, 129)}));
  expect_built(2);
  check(with({full(0, 20, 0, 256)}));
  expect_built(2);
  check(with({full(0, 20, 257, 30)}));  // no longer, but farther behind
  expect_built(3);
  check(with({full(0, 20, 130, 30)}));
  expect_built(4);
}

TEST_F(KeptPlansGpu, OtherHeadsAndStrides) {
  const std::vector<Rectangle> rectangles = {full(1, 20, 2, 30)};
  check(with(rectangles));
  check(with(rectangles, heads_of(4, 2, 16)));
  check(with(rectangles, heads_of(2, 2, 16)));
  check(with(rectangles, {2, 1, 16, 2, 0, 0.5F}));
  expect_built(4);
  Problem p = with(rectangles);
  p.q = with_gap(p.q, 16);
  check(p);
  p.kv = with_gap(p.kv, 8);
  check(p);
  p.d_out = with_gap(p.d_out, 24);
  check(p);
  EXPECT_EQ(plain().forward.built, 6);
  EXPECT_EQ(plain().backward.built, 7);
  EXPECT_EQ(kernel().note(), "");
  p.fixed_tiles = true;
  check(p);
  EXPECT_EQ(kernel().note(),
            "tiled kernel for 2 of 16 rectangles (bits that do not depend on the batch)");
}

TEST_F(KeptPlansGpu, MoreThanAreKept) {
  std::vector<Rectangle> rectangles;
  for (int64_t i = 0; i < 260; ++i) rectangles.push_back(full(i, 1, 259 - i, 1));
  Problem p = problem(heads_of(1, 1, 16), 260, 260, rectangles);
  p.narrow_partials = false;
  Forward got = p.cleared();
  const There q = send(p.q), kv = send(p.kv), out = send(got.out), lse = send(got.lse);
  for (const Rectangle& r : rectangles) {  // nothing waits for the copies of their tables
    ForwardBlock block;
    p.fill(block, q.ref, kv.ref, {&r, 1});
    block.out = out.ref;
    block.lse = lse.ref.as<float>();
    kernel().forward(block);
  }
  fetch(out, got.out);
  fetch(lse, got.lse);
  EXPECT_LE(worst_error(p, got, reference_forward(p)), 1);
  EXPECT_EQ(plain().forward.executed, 260);
}

}  // namespace
}  // namespace gyre
