#include "logprobs/row_gradient.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "logprob_cases.hpp"
#include "logprobs/reference.hpp"
#include "report/tolerance.hpp"
#include "runtime/buffer.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::LogitRows;
using test::Matrix;
using test::random_logits;

constexpr double none = -HUGE_VAL;
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr std::array both_types = {DType::f32, DType::bf16};

/// Rows of logits, what is kept of them, and gradients from above.
struct Case {
  LogitRows rows;
  int64_t per_row;
  double temperature = 1;
  int64_t first_column = 0;  // of the shard that the kernels see: the whole row
  std::vector<int32_t> ids;  // [rows, per_row] columns
  std::vector<double> g;     // [rows, per_row]
  std::vector<double> h;     // [rows]

  Case(LogitRows rows_, int64_t per_row_) : rows(std::move(rows_)), per_row(per_row_) {
    const auto count = static_cast<size_t>(rows.tokens * per_row);
    for (size_t i = 0; i < count; ++i) {
      ids.push_back(static_cast<int32_t>((7 * i + 3) % static_cast<size_t>(rows.vocab_size)));
      g.push_back(0.25 * static_cast<double>(i % 9) - 0.75);
    }
    for (int64_t t = 0; t < rows.tokens; ++t)
      h.push_back(t % 3 == 0 ? 0 : 0.5 - static_cast<double>(t % 4));
  }

  std::span<const double> g_of(int64_t t) const {
    return std::span(g).subspan(static_cast<size_t>(t * per_row), static_cast<size_t>(per_row));
  }
  std::span<const int32_t> ids_of(int64_t t) const {
    return std::span(ids).subspan(static_cast<size_t>(t * per_row), static_cast<size_t>(per_row));
  }
  float scale() const { return static_cast<float>(1 / temperature); }
  RowNormalizer normalizer(int64_t t) const {
    const std::span<const double> row = rows.row(t);
    double max = none, sum = 0;
    for (const double z : row) max = std::max(max, z);
    for (const double z : row)
      if (z != none) sum += std::exp((z - max) / temperature);
    return {static_cast<float>(max), static_cast<float>(std::log(sum))};
  }
  std::vector<RowNormalizer> normalizers() const {
    std::vector<RowNormalizer> all;
    for (int64_t t = 0; t < rows.tokens; ++t) all.push_back(normalizer(t));
    return all;
  }
  GradientCoefficients coefficient(int64_t t) const {
    const auto at = static_cast<size_t>(t);
    const double sum = std::accumulate(g_of(t).begin(), g_of(t).end(), 0.0);
    const double entropy =
        h[at] == 0 ? 0 : score_row_reference(rows.row(t), -1, temperature).entropy;
    return {static_cast<float>(-(sum + h[at] * entropy) / temperature),
            static_cast<float>(-h[at] / temperature)};
  }
  std::vector<GradientCoefficients> coefficients() const {
    std::vector<GradientCoefficients> all;
    for (int64_t t = 0; t < rows.tokens; ++t) all.push_back(coefficient(t));
    return all;
  }
  std::vector<float> weights() const {
    std::vector<float> all;
    for (const double x : g) all.push_back(static_cast<float>(x / temperature));
    return all;
  }
  std::vector<int32_t> global_ids() const {
    std::vector<int32_t> all = ids;
    for (int32_t& id : all) id += static_cast<int32_t>(first_column);
    return all;
  }
  /// Magnitudes of the weights at a column.
  double weight_at(int64_t t, int64_t column) const {
    double sum = 0;
    for (size_t k = 0; k < ids_of(t).size(); ++k)
      if (ids_of(t)[k] == column) sum += std::abs(g_of(t)[k] / temperature);
    return sum;
  }
  /// The logits with three columns of padding, which hold NaN.
  Matrix logits(DType type) const {
    return rows.shard(partition_of(std::vector<int64_t>{rows.vocab_size + 3}, rows.vocab_size), 0,
                      type);
  }
};

/// Runs row_gradient into `out`, which may be the logits.
void differentiate(const Case& c, ConstMatrixRef logits, MatrixRef out, int threads = 1) {
  const std::vector<int32_t> ids = c.global_ids();
  const std::vector<float> weights = c.weights();
  row_gradient(logits, {c.rows.vocab_size, c.scale(), threads}, c.normalizers(), c.coefficients(),
               {ids, weights, c.per_row, c.first_column}, out);
}

/// Error over tolerance of every element, the largest; padding must be 0.
double worst_share(const Case& c, const Matrix& got, DType type) {
  double worst = 0;
  for (int64_t t = 0; t < c.rows.tokens; ++t) {
    const auto at = static_cast<size_t>(t);
    const std::vector<double> logprob = log_softmax_reference(c.rows.row(t), c.temperature);
    const std::vector<double> want =
        score_gradient_reference(c.rows.row(t), c.ids_of(t), c.g_of(t), c.h[at], c.temperature);
    const GradientCoefficients coefficient = c.coefficient(t);
    for (int64_t v = 0; v < got.cols(); ++v) {
      const auto id = static_cast<size_t>(v);
      const bool padding = v >= c.rows.vocab_size;
      const double error = std::abs(got.at(t, v) - (padding ? 0 : want[id]));
      const double scale =
          padding ? 1e-300
                  : logit_gradient_scale(logprob[id], static_cast<double>(coefficient.a),
                                         static_cast<double>(coefficient.b), c.weight_at(t, v));
      const double share = error / (logit_gradient_tolerance(type) * scale);
      if (!(share <= worst)) worst = std::isnan(share) ? HUGE_VAL : share;
    }
  }
  return worst;
}

/// All four pairs of types against the reference, and in place bit for bit as out of place.
void expect_matches_reference(const Case& c) {
  for (const DType from : both_types) {
    Matrix logits = c.logits(from);
    for (const DType to : both_types) {
      Matrix out(logits.rows(), logits.cols(), to);
      differentiate(c, std::as_const(logits).ref(), out.ref());
      EXPECT_LE(worst_share(c, out, to), 1) << name_of(from) << " to " << name_of(to);
      if (from != to) continue;
      Matrix in_place = logits;
      differentiate(c, std::as_const(in_place).ref(), in_place.ref());
      for (int64_t t = 0; t < out.rows(); ++t)
        for (int64_t v = 0; v < out.cols(); ++v)
          ASSERT_EQ(out.at(t, v), in_place.at(t, v)) << "row " << t << ", column " << v;
    }
  }
}

TEST(RowGradient, MatchesReferenceForAllLengths) {
  for (int64_t columns = 1; columns <= 600; columns += columns < 140 ? 1 : 23) {
    SCOPED_TRACE(columns);
    expect_matches_reference(Case(random_logits(3, columns, DType::bf16), 1));
  }
  expect_matches_reference(Case(random_logits(2, 32768, DType::bf16), 2));
}

TEST(RowGradient, EveryInstructionSet) {
  test::on_every_simd_target([] {
    for (const int64_t columns : {1, 9, 31, 32, 33, 100, 1001})
      expect_matches_reference(Case(random_logits(4, columns, DType::bf16, 4), 3));
  });
}

TEST(RowGradient, OffsetsAndTemperatures) {
  for (const double temperature : {0.3, 1.0, 1.7, 20.0})
    for (const double offset : {0.0, 80.0, -80.0, 1e4, -1e4, 1e5}) {
      SCOPED_TRACE(testing::Message() << "temperature " << temperature << ", offset " << offset);
      Case c(random_logits(4, 133, DType::bf16, 3), 2);
      c.temperature = temperature;
      for (double& z : c.rows.values)
        z = static_cast<double>(to_float(to_bf16(static_cast<float>(z + offset))));
      expect_matches_reference(c);
    }
}

TEST(RowGradient, InfinitelyUnlikelyColumns) {
  Case c(random_logits(6, 300, DType::bf16), 2);
  for (int64_t t = 0; t < 6; ++t)
    for (int64_t v = 0; v < 300; ++v)
      if (v < 40 * t || v == 290) c.rows.at(t, v) = none;
  expect_matches_reference(c);
  Matrix logits = c.logits(DType::f32), out(6, 303, DType::f32);
  c.g.assign(c.g.size(), 0);
  differentiate(c, std::as_const(logits).ref(), out.ref());
  for (int64_t t = 0; t < 6; ++t) EXPECT_EQ(out.at(t, 290), 0) << "exactly";
}

TEST(RowGradient, PicksMayRepeatAndLieElsewhere) {
  Case c(random_logits(5, 70, DType::bf16), 40);
  for (size_t i = 0; i < c.ids.size(); ++i)
    c.ids[i] = static_cast<int32_t>(std::array{3, 3, 69, 0, 3, 12, 69}[i % 7]);
  expect_matches_reference(c);
  c.first_column = 1000;
  for (size_t i = 0; i < c.ids.size(); i += 3)
    c.ids[i] = std::array{-1, -1000, 70, 72, 100, -1001, -1100}[i % 7];
  expect_matches_reference(c);
}

TEST(RowGradient, SumsAtAPickAreRoundedOnce) {
  // p = 1/2: 1 + 2^-8 - 1/2 in bf16, where 1 + 2^-8 alone would round to 1.
  Case c(LogitRows(1, 2), 2);
  c.ids = {0, 0};
  c.g = {1, 0x1p-8};
  const std::vector<RowNormalizer> normalizer = {{0, static_cast<float>(std::log(2.0))}};
  const std::vector<GradientCoefficients> coefficient = {{-1, 0}};
  const std::vector<float> weights = {1, 0x1p-8};
  for (const bool in_place : {false, true}) {
    Matrix logits = c.logits(DType::bf16), out = logits;
    row_gradient(in_place ? std::as_const(out).ref() : std::as_const(logits).ref(), {2, 1, 1},
                 normalizer, coefficient, {c.ids, weights, 2, 0}, out.ref());
    EXPECT_EQ(out.at(0, 0), 0.5 + 0x1p-8);
    EXPECT_EQ(out.at(0, 1), -0.5);
  }
}

TEST(RowGradient, SumAtASinglePickIsRoundedOnce) {
  // The difference of two near numbers, of which bf16 would lose one half.
  const float log_sum = 0.35F, weight = 0.7F;
  const double want = static_cast<double>(weight) - std::exp(-static_cast<double>(log_sum));
  Matrix logits(1, 2, DType::bf16);
  logits.set(0, 0, 0), logits.set(0, 1, 0);
  const std::vector<int32_t> ids = {1};
  const std::vector<float> weights = {weight};
  row_gradient(std::as_const(logits).ref(), {2, 1, 1}, std::vector<RowNormalizer>{{0, log_sum}},
               std::vector<GradientCoefficients>{{-1, 0}}, {ids, weights, 1, 0}, logits.ref());
  EXPECT_NEAR(logits.at(0, 1), want,
              logit_gradient_tolerance(DType::f32) + epsilon_of(DType::bf16) * std::abs(want));
}

TEST(RowGradient, RowsWithoutGradientAreNotRead) {
  for (const DType type : both_types)
    for (const int64_t columns : {70, 2'000'000}) {  // the latter past the caches
      Matrix logits(2, columns, type);               // all NaN
      const std::vector<RowNormalizer> normalizers(2, {nan_value, nan_value});
      const std::vector<GradientCoefficients> coefficients(2, {0, -0.0F});
      const std::vector<int32_t> ids = {5, 7};
      const std::vector<float> weights = {0, 0};
      row_gradient(std::as_const(logits).ref(), {columns - 2, 1, 1}, normalizers, coefficients,
                   {ids, weights, 1, 0}, logits.ref());
      for (int64_t t = 0; t < 2; ++t)
        for (int64_t v = 0; v < columns; ++v) ASSERT_EQ(logits.at(t, v), 0);
    }
}

TEST(RowGradient, SlopesOfZeroLeaveTheWeights) {
  for (const DType type : both_types) {
    Matrix logits(1, 70, type);  // all NaN
    const std::vector<int32_t> ids = {5, 7, 5};
    const std::vector<float> weights = {1, -2, 0.5};
    row_gradient(std::as_const(logits).ref(), {66, 1, 1}, {std::vector<RowNormalizer>{{1, 2}}},
                 {std::vector<GradientCoefficients>{{0, 0}}}, {ids, weights, 3, 0}, logits.ref());
    for (int64_t v = 0; v < 70; ++v) EXPECT_EQ(logits.at(0, v), v == 5 ? 1.5 : v == 7 ? -2 : 0);
  }
}

TEST(RowGradient, WhatIsNotANumberFillsItsRowAlone) {
  Case c(random_logits(3, 100, DType::bf16), 1);
  c.ids = {-1, -1, -1};
  const std::vector<float> weights(3, 1);
  for (const RowNormalizer& bad :
       {RowNormalizer{1, nan_value}, RowNormalizer{nan_value, 1},
        RowNormalizer{HUGE_VALF, nan_value}, RowNormalizer{-HUGE_VALF, -HUGE_VALF}})
    for (const bool sloped : {false, true}) {
      std::vector<RowNormalizer> normalizers = c.normalizers();
      normalizers[1] = bad;
      std::vector<GradientCoefficients> coefficients = c.coefficients();
      if (!sloped) coefficients[1] = {0, 0};
      const Matrix logits = c.logits(DType::f32);
      Matrix out(3, 103, DType::bf16);
      row_gradient(logits.ref(), {100, 1, 1}, normalizers, coefficients, {c.ids, weights, 1, 0},
                   out.ref());
      for (int64_t t = 0; t < 3; ++t)
        for (int64_t v = 0; v < 103; ++v)
          ASSERT_EQ(std::isnan(out.at(t, v)), t == 1 && v < 100) << t << ' ' << v;
    }
}

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

/// Through the log-probabilities of all columns, from gradients `g` of them.
void expect_log_softmax_gradient(const Case& c, const LogitRows& g, DType from, DType of_g,
                                 DType to) {
  SCOPED_TRACE(testing::Message() << name_of(from) << ' ' << name_of(of_g) << ' ' << name_of(to));
  Matrix logits = c.logits(from), out(logits.rows(), logits.cols(), to);
  const Matrix above =
      g.shard(partition_of(std::vector<int64_t>{g.vocab_size + 3}, g.vocab_size), 0, of_g);
  std::vector<float> sums;
  for (int64_t t = 0; t < g.tokens; ++t)
    sums.push_back(static_cast<float>(std::accumulate(g.row(t).begin(), g.row(t).end(), 0.0)));
  const RowPass pass{c.rows.vocab_size, c.scale(), 1};
  row_log_softmax_gradient(std::as_const(logits).ref(), above.ref(), pass, c.normalizers(), sums,
                           out.ref());
  for (int64_t t = 0; t < g.tokens; ++t) {
    const auto want = log_softmax_gradient_reference(c.rows.row(t), g.row(t), c.temperature);
    const auto logprob = log_softmax_reference(c.rows.row(t), c.temperature);
    double sizes = 0;
    for (const double x : g.row(t)) sizes += std::abs(x / c.temperature);
    for (int64_t v = 0; v < out.cols(); ++v) {
      if (v >= g.vocab_size) {
        ASSERT_EQ(out.at(t, v), 0) << "padding";
        continue;
      }
      const auto id = static_cast<size_t>(v);
      ASSERT_NEAR(
          out.at(t, v), want[id],
          logit_gradient_tolerance(to) *
              logit_gradient_scale(logprob[id], sizes, 0, std::abs(g.row(t)[id] / c.temperature)))
          << t << ' ' << v;
    }
  }
  if (from != to) return;
  row_log_softmax_gradient(std::as_const(logits).ref(), above.ref(), pass, c.normalizers(), sums,
                           logits.ref());
  for (int64_t t = 0; t < g.tokens; ++t)
    for (int64_t v = 0; v < out.cols(); ++v) ASSERT_EQ(out.at(t, v), logits.at(t, v));
}

TEST(RowGradient, ThroughLogSoftmaxOfAllColumns) {
  test::on_every_simd_target([] {
    for (const int64_t columns : {1, 2, 31, 64, 101, 1001})
      for (const double temperature : {1.0, 0.3, 20.0}) {
        Case c(random_logits(4, columns, DType::bf16, 4), 0);
        c.temperature = temperature;
        for (int64_t v = 0; v + 1 < columns; v += 3) c.rows.at(2, v) = none;
        LogitRows g = random_logits(4, columns, DType::bf16, 1, 9, TokenTensor::d_logprobs);
        for (int64_t v = 0; v < columns; ++v) g.at(1, v) = 0;
        for (const DType from : both_types)
          for (const DType of_g : both_types)
            for (const DType to : both_types) expect_log_softmax_gradient(c, g, from, of_g, to);
      }
  });
}

TEST(RowGradient, ThroughLogSoftmaxOfNoDistributionIsNaN) {
  test::on_every_simd_target([] {
    const Matrix logits = Case(random_logits(3, 40, DType::bf16), 0).logits(DType::f32);
    const std::vector<RowNormalizer> normalizers = {{0, 1}, {0, nan_value}, {-HUGE_VALF, 0}};
    Matrix out(3, 43, DType::bf16);
    row_log_softmax_gradient(logits.ref(), logits.ref(), {40, 1, 1}, normalizers,
                             std::vector<float>(3, 1), out.ref());
    for (int64_t t = 0; t < 3; ++t)
      for (int64_t v = 0; v < 43; ++v) ASSERT_EQ(std::isnan(out.at(t, v)), t > 0 && v < 40);
  });
}

TEST(RowGradient, PlaceAndThreadsDoNotMatter) {
  const int64_t rows = 37, columns = 70001, kept = columns - 5;
  const Case c(random_logits(rows, kept, DType::bf16), 2);
  LargeMatrix<bf16> logits(rows, columns, 3, columns + 8);
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t v = 0; v < kept; ++v)
      logits.view(t, v) = to_bf16(static_cast<float>(c.rows.row(t)[static_cast<size_t>(v)]));
  const auto run = [&](MatrixRef out, int threads) { differentiate(c, logits.view, out, threads); };
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

TEST(RowGradient, Property) {
  EXPECT_TRUE(rc::check("any shape, coefficients and token_ids", [] {
    const auto columns = *rc::gen::inRange<int64_t>(1, 400);
    const auto per_row = *rc::gen::inRange<int64_t>(0, 12);
    Case c(random_logits(3, columns, DType::bf16, *rc::gen::element(0.5, 2.0, 30.0),
                         *rc::gen::arbitrary<uint64_t>()),
           per_row);
    c.temperature = *rc::gen::element(0.5, 1.0, 3.0);
    for (int32_t& id : c.ids)
      id = *rc::gen::inRange<int32_t>(-1, static_cast<int32_t>(columns) + 1);
    for (double& x : c.g) x = *rc::gen::element(0.0, 1.0, -0.5, 100.0);
    const auto masked = *rc::gen::inRange<int64_t>(0, columns);
    for (int64_t v = 0; v < masked; ++v) c.rows.at(1, v) = none;
    const DType from = *rc::gen::element(DType::f32, DType::bf16);
    const DType to = *rc::gen::element(DType::f32, DType::bf16);
    const Matrix logits = c.logits(from);
    Matrix out(3, columns + 3, to);
    differentiate(c, logits.ref(), out.ref());
    RC_ASSERT(worst_share(c, out, to) <= 1);
  }));
}

// The reference itself against finite differences of the scores.
TEST(RowGradient, ReferenceIsTheSlopeOfTheScores) {
  const LogitRows rows = random_logits(1, 12, DType::f32);
  const std::vector<int32_t> ids = {3, 11, 3};
  const std::vector<double> g = {0.7, -1.2, 0.4};
  const double h = 0.9, step = 1e-5;
  for (const double temperature : {0.6, 1.0, 2.5}) {
    const auto loss = [&](int64_t v, double move) {
      std::vector<double> row(rows.row(0).begin(), rows.row(0).end());
      row[static_cast<size_t>(v)] += move;
      double sum = h * score_row_reference(row, -1, temperature).entropy;
      for (size_t k = 0; k < ids.size(); ++k)
        sum += g[k] * score_row_reference(row, ids[k], temperature).logprob;
      return sum;
    };
    const std::vector<double> gradient =
        score_gradient_reference(rows.row(0), ids, g, h, temperature);
    for (int64_t v = 0; v < 12; ++v)
      EXPECT_NEAR(gradient[static_cast<size_t>(v)], (loss(v, step) - loss(v, -step)) / (2 * step),
                  1e-8);
  }
}

std::vector<double> gradient_of(const std::vector<double>& row, std::vector<int32_t> ids,
                                std::vector<double> g, double h) {
  LogitRows rows(1, std::ssize(row));
  rows.values = row;
  Case c(rows, std::ssize(ids));
  c.ids = std::move(ids);
  c.g = std::move(g);
  c.h = {h};
  const Matrix logits = c.logits(DType::f32);
  Matrix out(1, logits.cols(), DType::f32);
  differentiate(c, logits.ref(), out.ref());
  std::vector<double> gradient;
  for (int64_t v = 0; v < c.rows.vocab_size; ++v) gradient.push_back(out.at(0, v));
  return gradient;
}

TEST(RowGradient, GoldenRows) {
  const double tolerance = 4 * logit_gradient_tolerance(DType::f32);
  const LogitRows rows = test::golden_logits();
  const std::vector<double> row(rows.row(0).begin(), rows.row(0).end());
  const std::vector<double> of_target = gradient_of(row, {5}, {1}, 0);
  EXPECT_NEAR(of_target[5], 0.955982310, tolerance);
  EXPECT_NEAR(of_target[57], -0.174093340, tolerance);
  constexpr double first[] = {-1.070e-6, -8.956e-6, -7.4989e-5, -6.27879e-4, -5.257163e-3};
  for (size_t v = 0; v < 5; ++v) EXPECT_NEAR(of_target[v], first[v], 1e-9 + tolerance * 1e-3);
  double norm = 0, sum = 0;
  for (const double x : of_target) norm += std::abs(x), sum += x;
  EXPECT_NEAR(norm, 1.911964621, tolerance);
  EXPECT_NEAR(sum, 0, tolerance);

  const std::vector<double> of_entropy = gradient_of(row, {}, {}, 1);
  const auto [low, high] = std::minmax_element(of_entropy.begin(), of_entropy.end());
  EXPECT_EQ(low - of_entropy.begin(), 57);  // the gradient of Shannon's entropy
  EXPECT_EQ(high - of_entropy.begin(), 39);
  EXPECT_NEAR(*low, -0.155929988, tolerance);
  EXPECT_NEAR(*high, 0.026146259, tolerance);
}

TEST(RowGradient, GoldenRamp) {
  const double tolerance = 4 * logit_gradient_tolerance(DType::f32);
  const std::vector<double> ramp = {0, 1, 2, 3, 4};
  const auto expect = [&](const std::vector<double>& got, const std::array<double, 5>& want) {
    for (size_t v = 0; v < 5; ++v) EXPECT_NEAR(got[v], want[v], tolerance) << "column " << v;
  };
  expect(gradient_of(ramp, {}, {}, 1),
         {0.040236628, 0.077689574, 0.125053614, 0.105809309, -0.348789125});
  expect(gradient_of(ramp, {9}, {2}, 0),
         {-0.023312462, -0.063369842, -0.172257089, -0.468243315, -1.272817293});
  expect(gradient_of(ramp, {4, 4, 7}, {1, 2, 5}, 0),
         {-0.093249848, -0.253479366, -0.689028355, -1.872973258, -2.091269172});
}

// The other kernels.

TEST(RowLogSoftmax, MatchesReference) {
  test::on_every_simd_target([] {
    for (const DType from : both_types)
      for (const DType to : both_types)
        for (const int64_t columns : {1, 31, 64, 1003})
          for (const double offset : {0.0, 1e4}) {
            Case c(random_logits(3, columns, DType::bf16), 0);
            c.temperature = 1.5;
            for (double& z : c.rows.values)
              z = static_cast<double>(to_float(to_bf16(static_cast<float>(z + offset))));
            if (columns > 1) c.rows.at(1, 0) = none;
            const Matrix logits = c.logits(from);
            Matrix logs(3, columns + 3, to), values = logs;
            row_log_softmax(logits.ref(), {columns, c.scale(), 1}, c.normalizers(), false,
                            logs.ref());
            row_log_softmax(logits.ref(), {columns, c.scale(), 1}, c.normalizers(), true,
                            values.ref());
            for (int64_t t = 0; t < 3; ++t) {
              const std::vector<double> want = log_softmax_reference(c.rows.row(t), 1.5);
              for (int64_t v = 0; v < columns; ++v) {
                const double log_p = want[static_cast<size_t>(v)];
                if (log_p == none) {
                  EXPECT_EQ(logs.at(t, v), none);
                  EXPECT_EQ(values.at(t, v), 0);
                  continue;
                }
                ASSERT_NEAR(logs.at(t, v), log_p,
                            logit_gradient_tolerance(to) * logprob_scale(log_p));
                ASSERT_NEAR(values.at(t, v), std::exp(log_p),
                            logit_gradient_tolerance(to) * logit_gradient_scale(log_p, 1, 0, 0));
              }
              for (int64_t v = columns; v < columns + 3; ++v) {
                EXPECT_EQ(logs.at(t, v), none);
                EXPECT_EQ(values.at(t, v), 0);
              }
            }
          }
  });
}

TEST(RowLogSoftmax, ExponentialIsAccurate) {
  test::on_every_simd_target([] {
    const int64_t columns = 20000;
    LogitRows rows(1, columns);
    for (int64_t v = 0; v < columns; ++v)
      rows.at(0, v) = static_cast<double>(static_cast<float>(-0.0011 * static_cast<double>(v)));
    const Case c(rows, 0);
    const std::vector<RowNormalizer> normalizers = {{0, 0}};
    Matrix logits = c.logits(DType::f32);
    row_log_softmax(std::as_const(logits).ref(), {columns, 1, 1}, normalizers, true, logits.ref());
    double worst = 0;
    for (int64_t v = 0; v < columns; ++v) {
      const double z = rows.at(0, v), want = std::exp(z);
      // One rounding, and the one of the exponent at its size.
      const double tolerance = tolerance_for(DType::f32, 1) * (1 + std::abs(z));
      worst = std::max(worst, std::abs(logits.at(0, v) / want - 1) / tolerance);
    }
    EXPECT_LE(worst, 1);
  });
}

TEST(RowLogSoftmax, WhatIsNotANumberFillsItsRow) {
  Matrix logits(1, 5, DType::f32), out(1, 5, DType::f32);
  for (const bool exponentiate : {false, true}) {
    const std::vector<RowNormalizer> bad = {{1, nan_value}};
    row_log_softmax(std::as_const(logits).ref(), {4, 1, 1}, bad, exponentiate, out.ref());
    for (int64_t v = 0; v < 4; ++v) EXPECT_TRUE(std::isnan(out.at(0, v)));
    EXPECT_EQ(out.at(0, 4), exponentiate ? 0 : none);
  }
}

TEST(RowCrossGradient, MatchesReferenceForAllTypes) {
  test::on_every_simd_target([] {
    for (const DType s : both_types)
      for (const DType t : both_types)
        for (const DType to : both_types)
          for (const int64_t columns : {1, 33, 500}) {
            Case student(random_logits(4, columns, DType::bf16), 0);
            Case teacher(random_logits(4, columns, DType::bf16, 2, 7), 0);
            if (columns > 1) student.rows.at(1, 1) = teacher.rows.at(1, 1) = none;
            if (columns > 1) teacher.rows.at(2, 0) = none;
            const std::vector<float> g = {1, -2, 0.5, 0};
            Matrix student_logits = student.logits(s);
            const Matrix teacher_logits = teacher.logits(t);
            Matrix out(4, columns + 3, to);
            MatrixRef result = s == to ? student_logits.ref() : out.ref();
            row_cross_gradient(std::as_const(student_logits).ref(), teacher_logits.ref(),
                               {columns, 1, 1}, student.normalizers(), teacher.normalizers(), g,
                               result);
            for (int64_t r = 0; r < 4; ++r) {
              const auto factor = static_cast<double>(g[static_cast<size_t>(r)]);
              const std::vector<double> want = soft_cross_entropy_gradient_reference(
                  student.rows.row(r), teacher.rows.row(r), factor);
              const std::vector<double> log_q = log_softmax_reference(student.rows.row(r));
              const std::vector<double> log_p = log_softmax_reference(teacher.rows.row(r));
              for (int64_t v = 0; v < columns; ++v) {
                const auto id = static_cast<size_t>(v);
                const double scale = logit_gradient_scale(log_q[id], factor, 0, 0) +
                                     logit_gradient_scale(log_p[id], factor, 0, 0);
                ASSERT_NEAR(static_cast<double>(result.at(r, v)), want[id],
                            logit_gradient_tolerance(to) * scale);
              }
              for (int64_t v = columns; v < columns + 3; ++v) EXPECT_EQ(result.at(r, v), 0);
            }
          }
  });
}

TEST(RowCrossGradient, RowsWithoutGradientAreNotReadAndOthersKeepNaN) {
  Matrix student(2, 40, DType::f32), teacher(2, 40, DType::f32);
  const std::vector<RowNormalizer> good(2, {0, 0}), bad(2, {0, nan_value});
  const std::vector<float> g = {0, 1};
  Matrix out(2, 40, DType::f32);
  for (const bool bad_teacher : {false, true}) {
    row_cross_gradient(std::as_const(student).ref(), std::as_const(teacher).ref(), {38, 1, 1},
                       bad_teacher ? good : bad, bad_teacher ? bad : good, g, out.ref());
    for (int64_t v = 0; v < 40; ++v) {
      EXPECT_EQ(out.at(0, v), 0);
      EXPECT_EQ(std::isnan(out.at(1, v)), v < 38);
    }
  }
}

TEST(RowFilteredGradient, MatchesReference) {
  test::on_every_simd_target([] {
    for (const DType from : both_types)
      for (const DType to : both_types)
        for (const int64_t cut : {-5, 0, 1, 17, 32, 70, 100, 120, 1000}) {
          SCOPED_TRACE(cut);
          const int64_t columns = 103;
          // Small integers: many ties.
          LogitRows rows(3, columns);
          for (int64_t t = 0; t < 3; ++t)
            for (int64_t v = 0; v < columns; ++v)
              rows.at(t, v) = static_cast<double>((v * 37 + t * 11) % 10) - 4;
          rows.at(2, 50) = none;
          const float threshold = 2;
          Matrix logits = Case(rows, 0).logits(from);
          LogitRows left = rows;
          for (int64_t t = 0; t < 3; ++t)
            for (int64_t v = 0; v < columns; ++v)
              if (rows.at(t, v) < 2 || (rows.at(t, v) == 2 && v < cut)) left.at(t, v) = none;
          const Case kept(left, 0);
          const std::vector<RowSurvivors> survivors(3, {threshold, static_cast<int32_t>(cut)});
          const std::vector<int32_t> ids = {1003, 1066, 1000 + 50};  // dropped or not; -inf
          const std::vector<float> a = {-1, 0.5, -2}, weights = {1, -0.5, 2};
          Matrix out(3, columns + 3, to);
          MatrixRef result = from == to ? logits.ref() : out.ref();
          row_filtered_gradient(std::as_const(logits).ref(), {columns, 1, 1}, kept.normalizers(),
                                survivors, a, {ids, weights, 1, 1000}, result);
          for (int64_t t = 0; t < 3; ++t) {
            const auto at = static_cast<size_t>(t);
            const std::vector<double> log_p = log_softmax_reference(left.row(t));
            for (int64_t v = 0; v < columns + 3; ++v) {
              if (v >= columns || log_p[static_cast<size_t>(v)] == none) {
                ASSERT_EQ(result.at(t, v), 0) << t << ' ' << v;
                continue;
              }
              const double weight = ids[at] - 1000 == v ? static_cast<double>(weights[at]) : 0;
              const double p = std::exp(log_p[static_cast<size_t>(v)]);
              ASSERT_NEAR(static_cast<double>(result.at(t, v)),
                          static_cast<double>(a[at]) * p + weight,
                          logit_gradient_tolerance(to) *
                              logit_gradient_scale(log_p[static_cast<size_t>(v)],
                                                   static_cast<double>(a[at]), 0, std::abs(weight)))
                  << t << ' ' << v;
            }
          }
        }
  });
}

TEST(RowFilteredGradient, RowsWithoutGradientAreNotReadAndOthersKeepNaN) {
  Matrix logits(2, 40, DType::bf16);
  const std::vector<RowNormalizer> bad(2, {0, nan_value});
  const std::vector<RowSurvivors> survivors(2, {nan_value, 0});
  const std::vector<float> a = {0, 1}, weights = {0, 1};
  const std::vector<int32_t> ids = {3, 3};
  row_filtered_gradient(std::as_const(logits).ref(), {38, 1, 1}, bad, survivors, a,
                        {ids, weights, 1, 0}, logits.ref());
  for (int64_t v = 0; v < 40; ++v) {
    EXPECT_EQ(logits.at(0, v), 0);
    EXPECT_EQ(std::isnan(logits.at(1, v)), v < 38);
  }
}

TEST(Picks, ScatterAddsUpAndGatherTakesWhatTheShardHas) {
  for (const DType type : both_types) {
    Matrix out(3, 50, type);
    const std::vector<int32_t> ids = {100, 101, 100, 146, 147, 99, -1, 500, 146, 146, 146, 120};
    std::vector<float> weights(12);
    std::iota(weights.begin(), weights.end(), 1.0F);
    scatter_token_weights({ids, weights, 4, 100}, 47, out.ref(), 2);
    for (int64_t t = 0; t < 3; ++t)
      for (int64_t v = 0; v < 50; ++v) {
        double want = 0;
        for (size_t k = 0; k < 4; ++k) {
          const size_t at = static_cast<size_t>(4 * t) + k;
          if (ids[at] - 100 == v && v < 47) want += static_cast<double>(weights[at]);
        }
        EXPECT_EQ(out.at(t, v), want) << t << ' ' << v;
      }
    const LogitRows rows = random_logits(3, 47, DType::bf16);
    const Matrix logits = Case(rows, 0).logits(type);
    std::vector<float> values(12, -77);
    gather_token_logits(logits.ref(), ids, 4, 100, 47, values);
    for (size_t i = 0; i < ids.size(); ++i) {
      const int32_t v = ids[i] - 100;
      const bool owned = v >= 0 && v < 47;
      EXPECT_EQ(static_cast<double>(values[i]),
                owned ? rows.row(static_cast<int64_t>(i / 4))[static_cast<size_t>(v)] : -77);
    }
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
