#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "report/tolerance.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

Rectangle full(int64_t q, int64_t rows, int64_t k, int64_t keys) {
  return {LocalToken(q), rows, LocalToken(k), keys, {}};
}
Rectangle causal(int64_t q, int64_t rows, int64_t k, int64_t keys, int64_t offset,
                 int64_t window = 0, int64_t q_stride = 1, int64_t k_stride = 1) {
  return {LocalToken(q), rows, LocalToken(k), keys, {true, offset, q_stride, k_stride, window}};
}
BlockHeads heads_of(int64_t heads, int64_t kv_heads, int64_t dim) {
  return {heads, kv_heads, dim, heads / kv_heads, 0, 1 / std::sqrt(static_cast<float>(dim))};
}

/// A matrix of f32 or bf16 with gaps between rows; starts as NaN.
class Matrix {
 public:
  Matrix(DType type, int64_t rows, int64_t cols, int64_t gap)
      : type_(type),
        rows_(rows),
        cols_(cols),
        stride_(cols + gap),
        wide_(static_cast<size_t>(type == DType::f32 ? rows * stride_ : 0)),
        narrow_(static_cast<size_t>(type == DType::bf16 ? rows * stride_ : 0)) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < stride_; ++c) set(r, c, nan);
  }
  void set(int64_t r, int64_t c, float x) {
    const auto at = static_cast<size_t>(r * stride_ + c);
    if (type_ == DType::f32)
      wide_[at] = x;
    else
      narrow_[at] = to_bf16(x);
  }
  void fill_row(int64_t r, float x) {
    for (int64_t c = 0; c < cols_; ++c) set(r, c, x);
  }
  /// Standard normal numbers in rows that are still NaN.
  void fill(int64_t begin, int64_t count, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t r = begin; r < begin + count; ++r)
      if (std::isnan(ref().at(r, 0)))
        for (int64_t c = 0; c < cols_; ++c) set(r, c, normal(random));
  }
  MatrixRef ref() {
    auto* data = type_ == DType::f32 ? reinterpret_cast<std::byte*>(wide_.data())
                                     : reinterpret_cast<std::byte*>(narrow_.data());
    return {data, type_, rows_, cols_, stride_};
  }
  ConstMatrixRef ref() const { return const_cast<Matrix*>(this)->ref(); }
  MatrixView<float> view() { return ref().as<float>(); }
  float operator()(int64_t r, int64_t c) const { return ref().at(r, c); }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DType type() const { return type_; }
  bool same_bits(const Matrix& other) const {
    const auto equal_bits = [](float a, float b) {
      return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
    };
    return std::equal(wide_.begin(), wide_.end(), other.wide_.begin(), other.wide_.end(),
                      equal_bits) &&
           narrow_ == other.narrow_;
  }

 private:
  DType type_;
  int64_t rows_, cols_, stride_;
  std::vector<float> wide_;
  std::vector<bf16> narrow_;
};

struct Types {
  DType inputs = DType::f32, out = DType::f32, d_q = DType::f32;
};

struct Forward {
  Matrix out, lse;
};
struct Backward {
  Matrix d_q, d_kv;
};

/// Random queries, keys, values and output gradients in the rows that rectangles cover; NaN
/// elsewhere. Keys and values are interleaved by token.
struct Problem {
  Problem(BlockHeads heads_, int64_t rows_, int64_t keys_, std::vector<Rectangle> rectangles_,
          Types types_ = {})
      : heads(heads_),
        rows(rows_),
        keys(keys_),
        types(types_),
        rectangles(std::move(rectangles_)),
        q(types.inputs, rows, heads.heads * heads.head_dim, 5),
        kv(types.inputs, keys, 2 * heads.kv_heads * heads.head_dim, 0),
        d_out(types.inputs, rows, heads.heads * heads.head_dim, 3) {
    std::mt19937 random(31);
    for (const Rectangle& r : rectangles) {
      q.fill(r.q_begin.value(), r.q_length, random);
      d_out.fill(r.q_begin.value(), r.q_length, random);
      kv.fill(r.k_begin.value(), r.k_length, random);
    }
  }

  int64_t kv_width() const { return heads.kv_heads * heads.head_dim; }
  void fill(BlockInput& in, std::span<const Rectangle> some) const {
    in.heads = heads;
    in.q = q.ref();
    in.k = kv.ref().columns_from(0, kv_width());
    in.v = kv.ref().columns_from(kv_width(), kv_width());
    in.rectangles = some;
    in.fixed_tiles = fixed_tiles;
    in.progress = progress;
  }

  /// Nothing seen yet in rows that rectangles cover; NaN elsewhere.
  Forward cleared() const {
    Forward result{{types.out, rows, q.cols(), 2}, {DType::f32, rows, heads.heads, 1}};
    for (const Rectangle& r : rectangles)
      for (int64_t i = 0; i < r.q_length; ++i) {
        result.out.fill_row(r.q_begin.value() + i, 0);
        result.lse.fill_row(r.q_begin.value() + i, -infinity);
      }
    return result;
  }
  void add(BlockKernel& kernel, std::span<const Rectangle> some, Forward& to,
           bool overwrite = false) const {
    ForwardBlock block;
    fill(block, some);
    block.overwrite = overwrite;
    block.out = to.out.ref();
    block.lse = to.lse.view();
    kernel.forward(block);
  }
  Forward forward(BlockKernel& kernel) const {
    Forward result = cleared();
    add(kernel, rectangles, result);
    return result;
  }

  /// Zero in rows that rectangles cover; NaN elsewhere.
  Backward no_gradients() const {
    Backward result{{types.d_q, rows, q.cols(), 2}, {DType::f32, keys, kv.cols(), 0}};
    for (const Rectangle& r : rectangles) {
      for (int64_t i = 0; i < r.q_length; ++i) result.d_q.fill_row(r.q_begin.value() + i, 0);
      for (int64_t j = 0; j < r.k_length; ++j) result.d_kv.fill_row(r.k_begin.value() + j, 0);
    }
    return result;
  }
  struct Wanted {
    bool queries = true, keys = true;
    bool overwrite = false;
  };
  void add(BlockKernel& kernel, std::span<const Rectangle> some, const Forward& of, Backward& to,
           Wanted wanted = {true, true, false}) const {
    Matrix delta(DType::f32, rows, heads.heads, 0);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < heads.heads; ++h) {
        double sum = 0;
        for (int64_t d = h * heads.head_dim; d < (h + 1) * heads.head_dim; ++d)
          sum += static_cast<double>(of.out(r, d)) * static_cast<double>(d_out(r, d));
        delta.set(r, h, static_cast<float>(sum));
      }
    Matrix lse = of.lse;
    BackwardBlock block;
    fill(block, some);
    block.overwrite_d_q = block.overwrite_d_kv = wanted.overwrite;
    block.d_out = d_out.ref();
    block.lse = lse.view();
    block.delta = delta.view();
    if (wanted.queries) block.d_q = to.d_q.ref();
    if (wanted.keys) {
      block.d_k = to.d_kv.view().columns_from(0, kv_width());
      block.d_v = to.d_kv.view().columns_from(kv_width(), kv_width());
    }
    kernel.backward(block);
  }
  Backward backward(BlockKernel& kernel, const Forward& of,
                    Wanted wanted = {true, true, false}) const {
    Backward result = no_gradients();
    add(kernel, rectangles, of, result, wanted);
    return result;
  }

  BlockHeads heads;
  int64_t rows, keys;
  Types types;
  std::vector<Rectangle> rectangles;
  Matrix q, kv, d_out;
  bool fixed_tiles = false;
  std::function<void()> progress = {};
  double magnified = 1;      ///< size of scores, where it is large
  double gradient_term = 1;  ///< size of a term of a gradient
};

/// Largest error as a share of the tolerance, which is `tolerance` times the rms of the reference's
/// row, at least `least_rms`, plus the rounding of the matrix's own type. NaN where the reference
/// is not, or not NaN where it is: infinite.
double worst_error(const Matrix& got, const Matrix& want, double tolerance, double least_rms) {
  double worst = 0;
  for (int64_t r = 0; r < want.rows(); ++r) {
    double squares = 0;
    for (int64_t c = 0; c < want.cols(); ++c) squares += std::pow(want(r, c), 2);
    const double rms = std::max(std::sqrt(squares / static_cast<double>(want.cols())), least_rms);
    for (int64_t c = 0; c < want.cols(); ++c) {
      const auto x = static_cast<double>(got(r, c)), y = static_cast<double>(want(r, c));
      if (x == y || (std::isnan(x) && std::isnan(y))) continue;
      const double allowed =
          tolerance * (std::isnan(rms) ? 1 : rms) + epsilon_of(want.type()) * std::abs(y);
      const double share = std::abs(x - y) / allowed;
      if (!(share <= worst)) worst = std::isnan(share) ? HUGE_VAL : share;
    }
  }
  return worst;
}

double worst_error(const Problem& p, const Forward& got, const Forward& want) {
  const auto merges = std::ssize(p.rectangles);
  const double tolerance =
      p.magnified * attention_tolerance(p.heads.head_dim, p.keys, static_cast<int64_t>(merges));
  return std::max(worst_error(got.out, want.out, tolerance, 0),
                  worst_error(got.lse, want.lse, tolerance, 1));
}

/// Gradients are sums of terms of either sign, which may cancel: errors are relative to the size of
/// a term, 1 for standard normal inputs, where the rms of the row is below it.
double worst_error(const Problem& p, const Backward& got, const Backward& want) {
  const auto tolerance = [&](int64_t terms) {
    return p.magnified *
           tolerance_for(DType::f32, 2 * p.heads.head_dim + terms + roundings_per_merge);
  };
  return std::max(
      worst_error(got.d_q, want.d_q, tolerance(p.keys), p.gradient_term),
      worst_error(got.d_kv, want.d_kv, tolerance(p.rows * p.heads.group), p.gradient_term));
}

/// The tiled kernel against the reference, forward and backward.
void check(const Problem& p, int threads = 1) {
  const auto cpu = make_cpu_kernel(threads), reference = make_reference_kernel();
  const Forward want = p.forward(*reference);
  EXPECT_LE(worst_error(p, p.forward(*cpu), want), 1) << "forward, share of the tolerance";
  EXPECT_LE(worst_error(p, p.backward(*cpu, want), p.backward(*reference, want)), 1)
      << "backward, share of the tolerance";
}

/// Causal documents with gaps between them that stay NaN.
Problem several_documents(const BlockHeads& heads, const std::vector<int64_t>& lengths) {
  std::vector<Rectangle> documents;
  int64_t at = 3;
  for (const int64_t length : lengths) {
    documents.push_back(causal(at, length, at, length, 0));
    at += length + 3;
  }
  return Problem(heads, at, at, documents);
}

TEST(AttentionKernel, HeadDimensions) {
  for (const int64_t dim : {1, 4, 8, 13, 24, 32, 40, 64, 80, 96, 128, 256}) {
    SCOPED_TRACE(dim);
    check(Problem(heads_of(4, 2, dim), 150, 150, {causal(0, 150, 0, 150, 0)}));
  }
}

TEST(AttentionKernel, GroupedQueries) {
  for (const auto& [heads, kv_heads] :
       {std::pair{4, 4}, {4, 2}, {4, 1}, {6, 2}, {5, 1}, {7, 1}, {96, 1}}) {
    SCOPED_TRACE(testing::Message() << heads << " heads over " << kv_heads);
    check(Problem(heads_of(heads, kv_heads, 16), 70, 70, {causal(0, 70, 0, 70, 0)}));
  }
}

TEST(AttentionKernel, PartsOfGroups) {
  // Heads 2 to 7 of groups of 4: the last two of the first KV head, all of the second.
  check(Problem({6, 2, 16, 4, 2, 0.25F}, 90, 90, {causal(0, 90, 0, 90, 0)}));
  check(Problem({5, 3, 8, 3, 2, 0.25F}, 90, 90, {causal(0, 90, 0, 90, 0)}));
  check(Problem({1, 1, 8, 8, 7, 0.25F}, 90, 90, {causal(0, 90, 0, 90, 0)}));
}

TEST(AttentionKernel, PartOfAGroupIsItsHeads) {
  const BlockHeads whole = heads_of(8, 2, 8);
  const Problem p(whole, 40, 40, {causal(0, 40, 0, 40, 0)});
  Problem part({3, 2, 8, 4, 2, whole.scale}, 40, 40,
               p.rectangles);  // heads 2, 3 and 4 of the whole
  part.kv = p.kv;
  for (int64_t r = 0; r < 40; ++r)
    for (int64_t c = 0; c < 24; ++c) part.q.set(r, c, p.q(r, 16 + c));
  const double tolerance = attention_tolerance(8, 40, 1);
  for (const auto& kernel : {make_reference_kernel(), make_cpu_kernel()}) {
    const Forward all = p.forward(*kernel), some = part.forward(*kernel);
    for (int64_t r = 0; r < 40; ++r)
      for (int64_t c = 0; c < 24; ++c) EXPECT_NEAR(some.out(r, c), all.out(r, 16 + c), tolerance);
  }
}

TEST(AttentionKernel, RaggedSizes) {
  for (const int64_t rows : {1, 2, 15, 16, 17, 63, 64, 65, 129})
    for (const int64_t keys : {1, 3, 16, 31, 64, 65, 130, 300}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << keys << " keys");
      check(Problem(heads_of(2, 1, 24), rows + 3, keys + 2, {full(2, rows, 1, keys)}));
    }
}

TEST(AttentionKernel, Diagonals) {
  for (const int64_t offset :
       {-200, -100, -65, -64, -17, -1, 0, 1, 15, 16, 40, 63, 64, 99, 128, 300})
    for (const int64_t heads : {1, 3}) {
      SCOPED_TRACE(testing::Message() << "offset " << offset << ", heads " << heads);
      check(Problem(heads_of(heads, 1, 16), 100, 140, {causal(0, 100, 0, 140, offset)}));
    }
}

TEST(AttentionKernel, Windows) {
  for (const int64_t window : {1, 2, 15, 16, 17, 40, 64, 100, 400})
    for (const int64_t offset : {-30, 0, 17, 200, 500}) {
      SCOPED_TRACE(testing::Message() << "window " << window << ", offset " << offset);
      check(Problem(heads_of(2, 1, 16), 150, 330, {causal(0, 150, 0, 330, offset, window)}));
    }
}

TEST(AttentionKernel, Strides) {
  for (const auto& [q_stride, k_stride] : {std::pair{2, 1}, {1, 2}, {3, 3}, {4, 1}, {3, 7}})
    for (const int64_t window : {0, 5, 90}) {
      SCOPED_TRACE(testing::Message() << q_stride << ", " << k_stride << ", window " << window);
      check(Problem(heads_of(2, 1, 16), 100, 140,
                    {causal(0, 100, 0, 140, 3, window, q_stride, k_stride)}));
    }
}

TEST(AttentionKernel, RowsWithoutAKeyStayUntouched) {
  const Problem p(heads_of(2, 1, 32), 90, 40, {causal(10, 70, 0, 40, -25)});
  for (const auto& kernel : {make_cpu_kernel(), make_reference_kernel()}) {
    Forward r = p.forward(*kernel);
    for (const int64_t row : {10, 34}) {
      EXPECT_EQ(r.lse(row, 1), -infinity);
      EXPECT_EQ(r.out(row, 33), 0.0F);
    }
    EXPECT_GT(r.lse(35, 1), -infinity);
    r.out.set(34, 3, 42);
    p.add(*kernel, p.rectangles, r);
    EXPECT_EQ(r.out(34, 3), 42) << "a row that sees no key was written";
  }
}

TEST(AttentionKernel, DocumentsNeverMeet) {
  check(several_documents(heads_of(4, 2, 32), {5, 1, 64, 100, 2, 33, 290}));
}

TEST(AttentionKernel, ManyTinyDocuments) {
  std::vector<Rectangle> documents;
  for (int64_t i = 0; i < 100; ++i) documents.push_back(causal(3 * i, 3, 3 * i, 3, 0));
  check(Problem(heads_of(2, 2, 16), 300, 300, documents));
}

TEST(AttentionKernel, SeveralRectanglesForTheSameRows) {
  check(Problem(heads_of(2, 1, 32), 200, 400,
                {full(0, 200, 0, 70), causal(0, 200, 150, 200, 0), full(50, 100, 80, 65),
                 full(60, 1, 380, 20), causal(120, 80, 360, 20, -10)}));
}

TEST(AttentionKernel, EmptyRectanglesDoNothing) {
  check(Problem(heads_of(2, 1, 8), 20, 20,
                {full(0, 10, 0, 0), full(3, 0, 0, 20), causal(5, 10, 0, 20, -50)}));
  check(Problem(heads_of(2, 1, 8), 20, 20, {}));
}

TEST(AttentionKernel, EveryInstructionSet) {
  test::on_every_simd_target([] {
    check(Problem(heads_of(6, 2, 30), 100, 120, {full(0, 100, 0, 20), causal(0, 100, 20, 100, 0)},
                  {DType::bf16, DType::f32, DType::bf16}));
    check(Problem(heads_of(2, 1, 8), 20, 20, {causal(0, 20, 0, 20, -5)}));
    check(several_documents(heads_of(4, 2, 40), {1, 7, 8, 9, 33, 64, 100}));
    check(several_documents(heads_of(4, 2, 48), {1, 7, 8, 9, 24, 64}));
    check(Problem(heads_of(2, 1, 16), 20, 20, {causal(0, 20, 0, 20, 3, 5)},
                  {DType::bf16, DType::bf16, DType::bf16}));
    check(Problem(heads_of(2, 1, 6), 20, 20, {causal(0, 20, 0, 20, 3, 5)},
                  {DType::bf16, DType::bf16, DType::bf16}));
  });
}

/// Of the kernels that keep all scores of a row, as dot products or not, and of the one that keeps
/// blocks of them.
TEST(AttentionKernel, ShortAndLongRectangles) {
  for (const int64_t head_dim : {20, 32})
    for (const int64_t length : {1, 3, 7, 8, 9, 15, 24, 25, 63, 64, 65, 255, 256, 257})
      for (const int64_t window : {0, 1, 9, 70}) {
        SCOPED_TRACE(testing::Message() << length << " tokens of " << head_dim << ", " << window);
        check(Problem(heads_of(2, 1, head_dim), length, length,
                      {causal(0, length, 0, length, 0, window)}));
      }
}

TEST(AttentionKernel, ShortRectanglesWithKeysInCommon) {
  const Problem p(heads_of(4, 2, 24), 40, 40,
                  {full(0, 10, 0, 20), causal(10, 12, 5, 12, 2), full(22, 18, 3, 30)});
  for (const int threads : {1, 2, 3}) check(p, threads);
  const auto one = make_cpu_kernel(1), some = make_cpu_kernel(3);
  const Forward of = p.forward(*one);
  const Backward a = p.backward(*one, of), b = p.backward(*some, of);
  EXPECT_TRUE(a.d_q.same_bits(b.d_q) && a.d_kv.same_bits(b.d_kv));
}

TEST(AttentionKernel, ScalesOfEitherSign) {
  for (const float scale : {-0.7F, 0.0F, 1.5F}) {
    SCOPED_TRACE(scale);
    BlockHeads heads = heads_of(2, 1, 8);
    heads.scale = scale;
    check(several_documents(heads, {5, 40, 300}));
  }
}

/// Rows that are a multiple of 4 KiB apart are copied.
TEST(AttentionKernel, RowsThatShareCacheSets) {
  check(Problem(heads_of(8, 8, 64), 300, 300, {causal(0, 300, 0, 300, 0)}));
}

/// A random problem: documents behind each other with gaps, each with some rectangles in keys of
/// their own.
Problem arbitrary_problem() {
  const auto draw = [](int64_t low, int64_t high) { return *rc::gen::inRange(low, high + 1); };
  const auto type = [&] { return draw(0, 1) == 0 ? DType::f32 : DType::bf16; };
  BlockHeads heads;
  heads.group = draw(1, 4);
  heads.kv_heads = draw(1, 3);
  heads.skew = draw(0, heads.group - 1);
  heads.heads = draw(std::max<int64_t>(1, (heads.kv_heads - 1) * heads.group - heads.skew + 1),
                     heads.kv_heads * heads.group - heads.skew);
  heads.head_dim = *rc::gen::element<int64_t>(5, 8, 16, 32, 64, 80);
  heads.scale = 1 / std::sqrt(static_cast<float>(heads.head_dim));
  std::vector<Rectangle> rectangles;
  int64_t row = draw(0, 3), key = draw(0, 3);
  for (int64_t documents = draw(1, 4); documents > 0; --documents) {
    const bool is_short = draw(0, 1) == 1;
    const int64_t length = draw(1, is_short ? 24 : 150);
    for (int64_t parts = draw(1, 3); parts > 0; --parts) {
      const int64_t first = draw(0, length - 1), rows = draw(0, length - first);
      const int64_t keys = draw(0, is_short ? 24 : 300);
      const bool masked = draw(0, 3) > 0;
      Rectangle r = full(row + first, rows, key, keys);
      if (masked)
        r.mask = {draw(0, 3) > 0, is_short ? draw(-8, 24) : draw(-50, 300), draw(1, 3), draw(1, 3),
                  draw(0, 1) * draw(1, is_short ? 12 : 200)};
      rectangles.push_back(r);
      key += keys + draw(0, 3);
    }
    row += length + draw(0, 3);
  }
  std::stable_sort(rectangles.begin(), rectangles.end(),
                   [](const Rectangle& a, const Rectangle& b) { return a.q_begin < b.q_begin; });
  const bool fixed = draw(0, 1) == 1;
  const Types types{type(), fixed ? DType::f32 : type(), fixed ? DType::f32 : type()};
  Problem problem(heads, row + 1, key + 1, rectangles, types);
  problem.fixed_tiles = fixed;
  return problem;
}

TEST(AttentionKernel, AgreesWithTheReferenceForwardAndBackward) {
  EXPECT_TRUE(rc::check([] {
    const Problem p = arbitrary_problem();
    const auto cpu = make_cpu_kernel(*rc::gen::inRange(1, 4));
    const auto reference = make_reference_kernel();
    const Forward want = p.forward(*reference);
    RC_ASSERT(worst_error(p, p.forward(*cpu), want) <= 1);
    RC_ASSERT(worst_error(p, p.backward(*cpu, want), p.backward(*reference, want)) <= 1);
  }));
}

bool same_bits(const Matrix& a, const Matrix& b) {
  for (int64_t r = 0; r < a.rows(); ++r)
    for (int64_t c = 0; c < a.cols(); ++c)
      if (std::bit_cast<uint32_t>(a(r, c)) != std::bit_cast<uint32_t>(b(r, c))) return false;
  return true;
}

TEST(AttentionKernel, OverwrittenResultsAreThoseThatBeganWithNothing) {
  // Rows that no rectangle covers, too; what was there, NaN, is not read.
  EXPECT_TRUE(rc::check([] {
    const Problem p = arbitrary_problem();
    const auto cpu = make_cpu_kernel(*rc::gen::inRange(1, 4));
    RC_ASSERT(cpu->can_overwrite());
    const auto results = [&] {
      return Forward{{p.types.out, p.rows, p.q.cols(), 2}, {DType::f32, p.rows, p.heads.heads, 1}};
    };
    const auto gradients = [&] {
      return Backward{{p.types.d_q, p.rows, p.q.cols(), 2}, {DType::f32, p.keys, p.kv.cols(), 0}};
    };
    Forward merged = results(), written = results();
    Backward added = gradients(), replaced = gradients();
    for (int64_t r = 0; r < p.rows; ++r) {
      merged.out.fill_row(r, 0);
      merged.lse.fill_row(r, -infinity);
      added.d_q.fill_row(r, 0);
    }
    for (int64_t j = 0; j < p.keys; ++j) added.d_kv.fill_row(j, 0);
    p.add(*cpu, p.rectangles, merged);
    p.add(*cpu, p.rectangles, written, true);
    RC_ASSERT(same_bits(written.out, merged.out) && same_bits(written.lse, merged.lse));
    p.add(*cpu, p.rectangles, merged, added);
    p.add(*cpu, p.rectangles, merged, replaced, {true, true, true});
    RC_ASSERT(same_bits(replaced.d_q, added.d_q) && same_bits(replaced.d_kv, added.d_kv));
  }));
}

TEST(AttentionKernel, ResultsDoNotDependOnTheNumberOfThreads) {
  EXPECT_TRUE(rc::check([] {
    const Problem p = arbitrary_problem();
    const auto one = make_cpu_kernel(1), some = make_cpu_kernel(*rc::gen::inRange(2, 6));
    const Forward a = p.forward(*one), b = p.forward(*some);
    RC_ASSERT(a.out.same_bits(b.out) && a.lse.same_bits(b.lse));
    const Backward c = p.backward(*one, a), d = p.backward(*some, a);
    RC_ASSERT(c.d_q.same_bits(d.d_q));
    RC_ASSERT(c.d_kv.same_bits(d.d_kv));
  }));
}

TEST(AttentionKernel, UnwantedGradientsDoNotChangeTheOthers) {
  for (const int threads : {1, 2}) {
    const Problem p(heads_of(6, 3, 32), 200, 220,
                    {full(0, 200, 0, 20), causal(0, 200, 20, 200, 0)});
    const auto cpu = make_cpu_kernel(threads);
    const Forward of = p.forward(*cpu);
    const Backward both = p.backward(*cpu, of), none = p.no_gradients();
    const Backward queries = p.backward(*cpu, of, {true, false});
    const Backward keys = p.backward(*cpu, of, {false, true});
    EXPECT_TRUE(queries.d_q.same_bits(both.d_q) && queries.d_kv.same_bits(none.d_kv));
    EXPECT_TRUE(keys.d_kv.same_bits(both.d_kv) && keys.d_q.same_bits(none.d_q));
    EXPECT_FALSE(both.d_q.same_bits(none.d_q) || both.d_kv.same_bits(none.d_kv));
  }
}

/// [0, length) cut at random places.
std::vector<int64_t> arbitrary_cuts(int64_t length) {
  std::vector<int64_t> cuts{0, length};
  for (int n = *rc::gen::inRange(0, 5); n > 0; --n)
    cuts.push_back(*rc::gen::inRange<int64_t>(0, length + 1));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

/// One rectangle whose rows or keys can be dealt to several calls.
Problem arbitrary_fixed_problem() {
  const auto draw = [](int64_t low, int64_t high) { return *rc::gen::inRange(low, high + 1); };
  const int64_t rows = draw(1, 300), keys = draw(1, 400);
  const int64_t kv_heads = draw(1, 2);
  Rectangle r = full(draw(0, 2), rows, draw(0, 2), keys);
  if (draw(0, 3) > 0)
    r.mask = {draw(0, 3) > 0, draw(-50, 300), 1, draw(1, 2), draw(0, 1) * draw(1, 200)};
  const DType type = draw(0, 1) == 0 ? DType::f32 : DType::bf16;
  Problem p(heads_of(draw(1, 3) * kv_heads, kv_heads,
                     *rc::gen::element<int64_t>(5, 8, 24, 64, 80, 96, 128)),
            rows + 3, keys + 3, {r}, {type, type, DType::f32});
  p.fixed_tiles = true;
  return p;
}

TEST(AttentionKernel, FixedTilesGiveTheSameBitsHoweverQueriesAreDealt) {
  EXPECT_TRUE(rc::check([] {
    const Problem p = arbitrary_fixed_problem();
    const Rectangle& r = p.rectangles[0];
    const auto cpu = make_cpu_kernel(*rc::gen::inRange(1, 3));
    Forward whole = p.forward(*cpu);
    for (int again = 0; again < 2; ++again) p.add(*cpu, p.rectangles, whole);  // merged unevenly
    const Backward gradients = p.backward(*cpu, whole);
    Forward parts = p.cleared();
    Backward part_gradients = p.no_gradients();
    for (int round = 0; round < 3; ++round) {
      const std::vector<int64_t> cuts = arbitrary_cuts(r.q_length);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        Rectangle part = r;
        part.q_begin += cuts[i];
        part.q_length = cuts[i + 1] - cuts[i];
        part.mask.offset += r.mask.full() ? 0 : cuts[i] * r.mask.q_stride;
        p.add(*cpu, {&part, 1}, parts);
        if (round == 0) p.add(*cpu, {&part, 1}, whole, part_gradients, {true, false});
      }
    }
    RC_ASSERT(parts.out.same_bits(whole.out) && parts.lse.same_bits(whole.lse));
    RC_ASSERT(part_gradients.d_q.same_bits(gradients.d_q));
  }));
}

TEST(AttentionKernel, FixedTilesGiveTheSameBitsHoweverKeysAreDealt) {
  EXPECT_TRUE(rc::check([] {
    const Problem p = arbitrary_fixed_problem();
    const Rectangle& r = p.rectangles[0];
    const auto cpu = make_cpu_kernel(*rc::gen::inRange(1, 3));
    const Forward of = p.forward(*cpu);
    const Backward whole = p.backward(*cpu, of);
    Backward parts = p.no_gradients();
    const std::vector<int64_t> cuts = arbitrary_cuts(r.k_length);
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      Rectangle part = r;
      part.k_begin += cuts[i];
      part.k_length = cuts[i + 1] - cuts[i];
      part.mask.offset -= r.mask.full() ? 0 : cuts[i] * r.mask.k_stride;
      p.add(*cpu, {&part, 1}, of, parts, {false, true});
    }
    RC_ASSERT(parts.d_kv.same_bits(whole.d_kv));
  }));
}

TEST(AttentionKernel, BlockByBlockEqualsOnePass) {
  Problem p(heads_of(4, 2, 64), 130, 300, {full(0, 130, 0, 300)});
  const auto cpu = make_cpu_kernel();
  const Forward whole = p.forward(*cpu);
  const Backward gradients = p.backward(*cpu, whole);
  Forward parts = p.cleared();
  Backward part_gradients = p.no_gradients();
  for (const auto& [begin, keys] : {std::pair{200, 100}, {0, 1}, {1, 64}, {65, 135}}) {
    const Rectangle part = full(0, 130, begin, keys);
    p.add(*cpu, {&part, 1}, parts);
    p.add(*cpu, {&part, 1}, whole, part_gradients);
  }
  EXPECT_LE(worst_error(p, parts, whole), 1);
  EXPECT_LE(worst_error(p, part_gradients, gradients), 1);
}

TEST(AttentionKernel, LargeOffsets) {
  Problem p(heads_of(2, 1, 32), 100, 200, {causal(0, 100, 0, 200, 50)});
  // Scores around 1e4: one dimension of the queries times one of the keys.
  for (int64_t r = 0; r < 200; ++r) p.kv.set(r, 0, 100);
  for (int64_t r = 0; r < 100; ++r)
    for (int64_t h = 0; h < 2; ++h) p.q.set(r, h * 32, 100 / p.heads.scale);
  p.magnified = 1e4;
  p.gradient_term = 100;
  check(p);
}

TEST(AttentionKernel, ScoresThatKeepGrowing) {
  // Every block of keys exceeds the maximum of the ones before.
  Problem p(heads_of(1, 1, 8), 70, 300, {full(0, 70, 0, 300)});
  for (int64_t r = 0; r < 300; ++r) p.kv.set(r, 3, static_cast<float>(2 * r));
  for (int64_t r = 0; r < 70; ++r) p.q.set(r, 3, 1);
  p.magnified = 210;
  p.gradient_term = 600;
  check(p);
  for (int64_t r = 0; r < 70; ++r) p.q.set(r, 3, -1);  // or falls far below it
  check(p);
}

TEST(AttentionKernel, NotANumberInAVisibleRowShows) {
  test::on_every_simd_target([] {
    for (const bool fixed : {false, true}) {
      Problem p(heads_of(1, 1, 8), 40, 40, {causal(0, 20, 0, 20, 0), causal(20, 20, 20, 20, 0)});
      p.fixed_tiles = fixed;
      p.q.set(7, 2, nan);
      p.kv.set(30, 8 + 5, nan);  // a value
      p.kv.set(35, 1, nan);      // a key
      const auto cpu = make_cpu_kernel();
      const Forward r = p.forward(*cpu);
      EXPECT_TRUE(std::isnan(r.lse(7, 0)) && std::isnan(r.out(7, 0)));
      EXPECT_FALSE(std::isnan(r.lse(6, 0)) || std::isnan(r.out(6, 0)));
      EXPECT_TRUE(std::isnan(r.out(30, 5)));
      EXPECT_FALSE(std::isnan(r.lse(34, 0)));
      EXPECT_TRUE(std::isnan(r.lse(35, 0)) && std::isnan(r.lse(39, 0)));
      const Backward g = p.backward(*cpu, r);
      EXPECT_TRUE(std::isnan(g.d_q(7, 0)) && std::isnan(g.d_kv(3, 0)) && std::isnan(g.d_kv(3, 8)));
      EXPECT_FALSE(std::isnan(g.d_q(6, 0)));
      EXPECT_TRUE(std::isnan(g.d_q(39, 0)) && std::isnan(g.d_kv(38, 0)));
    }
  });
}

TEST(AttentionKernel, InfiniteScoresShowAndStayInTheirRow) {
  test::on_every_simd_target([] {
    Problem p(heads_of(1, 1, 8), 20, 20, {causal(0, 20, 0, 20, 0)});
    p.q.set(7, 2, infinity);
    const auto cpu = make_cpu_kernel();
    const Forward r = p.forward(*cpu);
    EXPECT_TRUE(std::isnan(r.lse(7, 0)));
    EXPECT_FALSE(std::isnan(r.lse(6, 0)) || std::isnan(r.lse(8, 0)));
    (void)p.backward(*cpu, r);
  });
}

TEST(AttentionKernel, RowsThatSawNothingHaveNoGradientWhateverTheyHold) {
  for (const bool fixed : {false, true}) {
    Problem p(heads_of(2, 1, 16), 100, 100, {causal(0, 100, 0, 100, -10)});
    p.fixed_tiles = fixed;
    for (int64_t r = 0; r < 10; ++r) p.q.fill_row(r, nan), p.d_out.fill_row(r, nan);
    for (const auto& kernel : {make_cpu_kernel(), make_reference_kernel()}) {
      Forward of = p.forward(*kernel);
      of.lse.fill_row(50, -infinity);  // also if the mask would let it see something
      p.q.fill_row(50, nan);
      p.d_out.fill_row(50, nan);
      const Backward g = p.backward(*kernel, of);
      for (int64_t c = 0; c < 32; ++c) EXPECT_EQ(g.d_q(5, c), 0) << c;
      for (int64_t c = 0; c < 32; ++c) EXPECT_EQ(g.d_q(50, c), 0) << c;
      for (int64_t j = 0; j < 90; ++j) EXPECT_FALSE(std::isnan(g.d_kv(j, 0))) << j;
      for (int64_t j = 0; j < 90; ++j) EXPECT_NE(g.d_kv(j, 20), 0) << j;
      EXPECT_EQ(g.d_kv(95, 0), 0) << "a key that nobody sees";
    }
  }
}

/// Attention of one head in double precision, straight from the definition.
struct Dense {
  std::vector<double> q, k, v, d_out;  // [rows][dim], [keys][dim]
  int64_t rows, keys, dim;
  double scale;
  Mask mask;

  bool visible(int64_t i, int64_t j) const {
    const int64_t query = mask.offset + i * mask.q_stride, key = j * mask.k_stride;
    return (!mask.causal || key <= query) && (mask.window == 0 || query - key < mask.window);
  }
  /// sum over rows of <O_i, dO_i>
  double loss() const {
    double total = 0;
    for (int64_t i = 0; i < rows; ++i) {
      double weights = 0, sum = 0;
      for (int64_t j = 0; j < keys; ++j) {
        if (!visible(i, j)) continue;
        const auto row = [dim = dim](const std::vector<double>& m, int64_t r) {
          return m.begin() + r * dim;
        };
        const double score = std::inner_product(row(q, i), row(q, i) + dim, row(k, j), 0.0);
        const double weight = std::exp(scale * score);
        weights += weight;
        sum += weight * std::inner_product(row(d_out, i), row(d_out, i) + dim, row(v, j), 0.0);
      }
      if (weights > 0) total += sum / weights;
    }
    return total;
  }
  /// Central difference of the loss by every element of one of the inputs. Cut off behind h²,
  /// rounded by eps / h: both below 1e-8 for h = 1e-5 and values of order one.
  std::vector<double> differences(std::vector<double>& by) {
    constexpr double h = 1e-5;
    std::vector<double> result;
    for (double& x : by) {
      const double at = x;
      x = at + h;
      const double above = loss();
      x = at - h;
      result.push_back((above - loss()) / (2 * h));
      x = at;
    }
    return result;
  }
};

TEST(AttentionKernel, ReferenceGradientsAreDerivatives) {
  for (const Mask& mask :
       {Mask{}, Mask{true, 3}, Mask{true, -2}, Mask{true, 2, 1, 1, 3}, Mask{true, 1, 2, 3, 7},
        Mask{false, 2, 1, 1, 1}, Mask{false, 5, 2, 3, 4}}) {
    const int64_t rows = 5, keys = 7, dim = 3;
    const Rectangle r{LocalToken(0), rows, LocalToken(0), keys, mask};
    const Problem p(heads_of(1, 1, dim), rows, keys, {r});
    const auto values = [](const Matrix& m, int64_t begin) {
      std::vector<double> all;
      for (int64_t i = 0; i < m.rows(); ++i)
        for (int64_t c = begin; c < begin + dim; ++c) all.push_back(m(i, c));
      return all;
    };
    Dense dense{values(p.q, 0),
                values(p.kv, 0),
                values(p.kv, dim),
                values(p.d_out, 0),
                rows,
                keys,
                dim,
                p.heads.scale,
                mask};
    const auto reference = make_reference_kernel();
    const Backward g = p.backward(*reference, p.forward(*reference));
    const double tolerance = tolerance_for(DType::f32, 2 * dim + keys + roundings_per_merge);
    const auto expect_equal = [&](const std::vector<double>& want, const std::vector<double>& got) {
      ASSERT_EQ(want.size(), got.size());
      for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(want[i], got[i], tolerance) << i;
    };
    expect_equal(dense.differences(dense.q), values(g.d_q, 0));
    expect_equal(dense.differences(dense.k), values(g.d_kv, 0));
    expect_equal(dense.differences(dense.v), values(g.d_kv, dim));
  }
}

TEST(AttentionKernel, RepeatsBitForBit) {
  const Problem p(heads_of(4, 2, 32), 200, 200, {causal(0, 200, 0, 200, 0)});
  const auto cpu = make_cpu_kernel(), other = make_cpu_kernel();
  const Forward first = p.forward(*cpu), second = p.forward(*cpu), third = p.forward(*other);
  EXPECT_TRUE(first.out.same_bits(second.out) && first.lse.same_bits(second.lse));
  EXPECT_TRUE(first.out.same_bits(third.out) && first.lse.same_bits(third.lse));
  const Backward a = p.backward(*cpu, first), b = p.backward(*other, first);
  EXPECT_TRUE(a.d_q.same_bits(b.d_q) && a.d_kv.same_bits(b.d_kv));
}

TEST(AttentionKernel, OneKernelServesDifferentShapes) {
  const auto cpu = make_cpu_kernel(), reference = make_reference_kernel();
  for (const int64_t dim : {32, 64, 8, 32, 128, 16})
    for (const DType type : {DType::f32, DType::bf16}) {
      const Problem p(heads_of(2, 1, dim), 80, 90, {causal(0, 80, 0, 90, 3)}, {type, type, type});
      const Forward want = p.forward(*reference);
      EXPECT_LE(worst_error(p, p.forward(*cpu), want), 1);
      EXPECT_LE(worst_error(p, p.backward(*cpu, want), p.backward(*reference, want)), 1);
    }
}

TEST(AttentionKernel, CallsProgressBetweenTilesFromTheThreadThatCalled) {
  for (const int threads : {1, 2}) {
    Problem p(heads_of(3, 3, 64), 1024, 1024, {causal(0, 1024, 0, 1024, 0)});
    int calls = 0;
    p.progress = [&calls, caller = std::this_thread::get_id()] {
      ++calls;
      EXPECT_EQ(std::this_thread::get_id(), caller);
    };
    const auto cpu = make_cpu_kernel(threads);
    const Forward r = p.forward(*cpu);
    EXPECT_GT(calls, threads == 1 ? 50 : -1);  // one of two threads may find nothing left to do
    calls = 0;
    (void)p.backward(*cpu, r);
    EXPECT_GT(calls, threads == 1 ? 100 : -1);
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
