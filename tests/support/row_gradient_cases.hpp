#pragma once
// Gradients of rows on every backend, against references in double precision. Results are computed
// in place where the types allow it.

#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "row_kernel_test.hpp"

namespace gyre::test::row_kernels {

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
    for (int64_t i = 0; i < rows.tokens * per_row; ++i) {
      ids.push_back(static_cast<int32_t>((7 * i + 3) % rows.vocab_size));
      g.push_back(0.25 * static_cast<double>(i % 9) - 0.75);
    }
    for (int64_t t = 0; t < rows.tokens; ++t)
      h.push_back(t % 3 == 0 ? 0 : 0.5 - static_cast<double>(t % 4));
  }

  template <class T>
  std::span<const T> row_of(const std::vector<T>& all, int64_t t) const {
    return std::span(all).subspan(t * per_row, static_cast<size_t>(per_row));
  }
  float scale() const { return static_cast<float>(1 / temperature); }
  RowPass pass(int threads = 1) const { return {rows.vocab_size, scale(), threads}; }
  std::vector<RowNormalizer> normalizers() const {
    std::vector<RowNormalizer> all;
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const auto row = rows.row(t);
      const double max = *std::max_element(row.begin(), row.end());
      double sum = 0;
      for (const double z : row) sum += z == none ? 0 : std::exp((z - max) / temperature);
      all.push_back({static_cast<float>(max), static_cast<float>(std::log(sum))});
    }
    return all;
  }
  std::vector<GradientCoefficients> coefficients() const {
    std::vector<GradientCoefficients> all;
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const auto of_ids = row_of(g, t);
      const double sum = std::accumulate(of_ids.begin(), of_ids.end(), 0.0);
      const double slope = h[t];
      const double entropy =
          slope == 0 ? 0 : score_row_reference(rows.row(t), -1, temperature).entropy;
      all.push_back({static_cast<float>(-(sum + slope * entropy) / temperature),
                     static_cast<float>(-slope / temperature)});
    }
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

  /// Error over tolerance of every element, the largest; padding must be 0.
  double worst_share(const Matrix& got, DType type) const {
    double worst = 0;
    const std::vector<GradientCoefficients> all = coefficients();
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const GradientCoefficients& c = all[t];
      const auto columns = row_of(ids, t);
      const auto of_ids = row_of(g, t);
      const auto logprob = log_softmax_reference(rows.row(t), temperature);
      const auto want = score_gradient_reference(rows.row(t), columns, of_ids, h[t], temperature);
      for (int64_t v = 0; v < got.cols(); ++v) {
        const auto id = static_cast<size_t>(v);
        const bool padding = v >= rows.vocab_size;
        double weight = 0;
        for (size_t k = 0; k < columns.size(); ++k)
          if (columns[k] == v) weight += std::abs(of_ids[k] / temperature);
        const double scale = padding ? 0
                                     : logit_gradient_scale(logprob[id], static_cast<double>(c.a),
                                                            static_cast<double>(c.b), weight);
        worst = std::max(worst, share_of(got.at(t, v), padding ? 0 : want[id],
                                         logit_gradient_tolerance(type) * scale));
      }
    }
    return worst;
  }
};

class RowGradient : public RowKernelTest {
 protected:
  /// What `work` computes from logits on the backend, as `to`: in place, or in another matrix.
  using Work = std::function<void(ConstMatrixRef logits, MatrixRef out)>;
  Matrix apply(const Matrix& logits, DType to, bool in_place, const Work& work, int64_t lead = 0) {
    DeviceMatrix from(logits.ref(), stream(), lead);
    DeviceMatrix apart(logits.rows(), in_place ? 0 : logits.cols(), to, stream());
    DeviceMatrix& out = in_place ? from : apart;
    work(std::as_const(from).ref(), out.ref());
    return out.host();
  }
  Matrix differentiate(const Case& c, const Matrix& logits, DType to, bool in_place,
                       int64_t lead = 0) {
    const std::vector<int32_t> ids = c.global_ids();
    const std::vector<float> weights = c.weights();
    return apply(
        logits, to, in_place,
        [&](ConstMatrixRef from, MatrixRef out) {
          kernels().gradient(from, c.pass(), c.normalizers(), c.coefficients(),
                             {ids, weights, c.per_row, c.first_column}, out);
        },
        lead);
  }
  /// All four pairs of types against the reference, and in place bit for bit as out of place.
  void expect_reference(const Case& c, int64_t lead = 0) {
    for (const DType from : both_types)
      for (const DType to : both_types) {
        const Matrix logits = padded(c.rows, from);
        const Matrix out = differentiate(c, logits, to, false, lead);
        EXPECT_LE(c.worst_share(out, to), 1) << name_of(from) << " to " << name_of(to);
        if (from != to) continue;
        const Matrix in_place = differentiate(c, logits, to, true, lead);
        for (int64_t t = 0; t < out.rows(); ++t)
          for (int64_t v = 0; v < out.cols(); ++v)
            ASSERT_EQ(out.at(t, v), in_place.at(t, v)) << "row " << t << ", column " << v;
      }
  }
  std::vector<double> gradient_of(const std::vector<double>& row, std::vector<int32_t> ids,
                                  std::vector<double> g, double h) {
    Case c(one_row(row), std::ssize(ids));
    c.ids = std::move(ids);
    c.g = std::move(g);
    c.h = {h};
    const Matrix out = differentiate(c, padded(c.rows, DType::f32), DType::f32, false);
    std::vector<double> gradient;
    for (int64_t v = 0; v < c.rows.vocab_size; ++v) gradient.push_back(out.at(0, v));
    return gradient;
  }
};

/// Calls f(from, to, columns) for all pairs of types and these numbers of columns.
template <class F>
void for_types_and_columns(const std::vector<int64_t>& lengths, F f) {
  for (const DType from : both_types)
    for (const DType to : both_types)
      for (const int64_t columns : lengths) {
        SCOPED_TRACE(testing::Message()
                     << name_of(from) << " to " << name_of(to) << ", " << columns << " columns");
        f(from, to, columns);
      }
}

TEST_P(RowGradient, MatchesTheReferenceForAnyLengthAndAddress) {
  std::vector<int64_t> lengths = {1, 7, 33, 300, 2500};
  if (on_host())
    for (int64_t columns = 2; columns <= 600; columns += columns < 140 ? 1 : 23)
      lengths.push_back(columns);
  for (const int64_t columns : lengths)
    for (const int64_t per_row : pick<int64_t>({1}, {0, 1, 70})) {
      SCOPED_TRACE(testing::Message() << columns << " columns, " << per_row << " ids");
      Case c(random_logits(3, columns, DType::bf16, 3), per_row);
      expect_reference(c);
      c.temperature = 0.7;
      if (columns > 2) c.rows.at(2, 1) = none;
      if (!on_host()) expect_reference(c, 3);
    }
  for (const int64_t lead : {0, 1})
    expect_reference(Case(random_logits(2, 36000, DType::bf16), 5), lead);
}

TEST_P(RowGradient, EveryInstructionSet) {
  on_every_target([&] {
    for (const int64_t columns : {1, 9, 31, 32, 33, 100, 1001})
      expect_reference(Case(random_logits(4, columns, DType::bf16, 4), 3), columns % 2);
  });
}

TEST_P(RowGradient, OffsetsAndTemperatures) {
  for (const double temperature : {0.3, 1.0, 1.7, 20.0})
    for (const double offset : {0.0, 80.0, -80.0, 1e4, -1e4, 1e5}) {
      SCOPED_TRACE(testing::Message() << "temperature " << temperature << ", offset " << offset);
      Case c(random_logits(4, 133, DType::bf16, 3), 2);
      c.temperature = temperature;
      for (double& z : c.rows.values) z = stored(z + offset, DType::bf16);
      expect_reference(c);
    }
}

TEST_P(RowGradient, InfinitelyUnlikelyColumns) {
  Case c(random_logits(6, 300, DType::bf16), 2);
  for (int64_t t = 0; t < 6; ++t)
    for (int64_t v = 0; v < 300; ++v)
      if (v < 40 * t || v == 290) c.rows.at(t, v) = none;
  expect_reference(c);
  c.g.assign(c.g.size(), 0);
  const Matrix out = differentiate(c, padded(c.rows, DType::f32), DType::f32, false);
  for (int64_t t = 0; t < 6; ++t) EXPECT_EQ(out.at(t, 290), 0) << "exactly";
}

TEST_P(RowGradient, TokenIdsMayRepeatAndLieElsewhere) {
  Case c(random_logits(5, 70, DType::bf16), 40);
  for (size_t i = 0; i < c.ids.size(); ++i)
    c.ids[i] = static_cast<int32_t>(std::array{3, 3, 69, 0, 3, 12, 69}[i % 7]);
  expect_reference(c);
  c.first_column = 1000;
  for (size_t i = 0; i < c.ids.size(); i += 3)
    c.ids[i] = std::array{-1, -1000, 70, 72, 100, -1001, -1100}[i % 7];
  expect_reference(c);
}

TEST_P(RowGradient, SumsAtATokenIdAreRoundedOnce) {
  // p = 1/2: 1 + 2^-8 - 1/2 in bf16, where 1 + 2^-8 alone would round to 1.
  Case c(LogitRows(1, 2), 2);
  c.ids = {0, 0};
  c.g = {1, 0x1p-8};
  const auto run = [&](bool in_place, const RowNormalizer& row, std::vector<int32_t> ids,
                       std::vector<float> weights) {
    const auto per_row = std::ssize(ids);
    return apply(padded(c.rows, DType::bf16), DType::bf16, in_place,
                 [&](ConstMatrixRef from, MatrixRef out) {
                   kernels().gradient(from, {2, 1, 1}, {{row}},
                                      std::vector<GradientCoefficients>{{-1, 0}},
                                      {ids, weights, per_row, 0}, out);
                 });
  };
  for (const bool in_place : {false, true}) {
    const Matrix out = run(in_place, {0, static_cast<float>(std::log(2.0))}, {0, 0}, {1, 0x1p-8});
    EXPECT_EQ(out.at(0, 0), 0.5 + 0x1p-8);
    EXPECT_EQ(out.at(0, 1), -0.5);
  }
  // The difference of two near numbers, of which bf16 would lose one half.
  const float log_sum = 0.35F, weight = 0.7F;
  const double want = static_cast<double>(weight) - std::exp(-static_cast<double>(log_sum));
  EXPECT_NEAR(run(true, {0, log_sum}, {1}, {weight}).at(0, 1), want,
              logit_gradient_tolerance(DType::f32) + epsilon_of(DType::bf16) * std::abs(want));
}

TEST_P(RowGradient, RowsWithoutGradientAreNotRead) {
  const std::vector<RowNormalizer> normalizers(2, {nan_value, nan_value});
  const std::vector<GradientCoefficients> coefficients(2, {0, -0.0F});
  const std::vector<int32_t> ids = {5, 7};
  const std::vector<float> weights = {0, 0};
  for (const DType type : both_types)
    for (const int64_t columns : pick<int64_t>({70, 2'000'000}, {70})) {  // past the caches
      const Matrix got =
          apply(Matrix(2, columns, type), type, true, [&](ConstMatrixRef nans, MatrixRef out) {
            kernels().gradient(nans, {columns - 2, 1, 1}, normalizers, coefficients,
                               {ids, weights, 1, 0}, out);
          });
      for (int64_t t = 0; t < 2; ++t)
        for (int64_t v = 0; v < columns; ++v) ASSERT_EQ(got.at(t, v), 0);
    }
}

TEST_P(RowGradient, SlopesOfZeroLeaveTheWeights) {
  // 1 + 2^-9 six times is 1.01171875: lost if each addition were rounded to bf16.
  std::vector<int32_t> ids(8, 5);
  std::vector<float> weights(8, 0x1p-9F);
  weights[0] = 1;
  ids[7] = 7;
  weights[7] = -2;
  for (const DType type : both_types) {
    const Matrix got =
        apply(Matrix(1, 70, type), type, true, [&](ConstMatrixRef nans, MatrixRef out) {
          kernels().gradient(nans, {66, 1, 1}, std::vector<RowNormalizer>{{1, 2}},
                             std::vector<GradientCoefficients>{{0, 0}}, {ids, weights, 8, 0}, out);
        });
    for (int64_t v = 0; v < 70; ++v)
      EXPECT_EQ(got.at(0, v), v == 5 ? stored(1 + 6 * 0x1p-9, type) : v == 7 ? -2 : 0);
  }
}

TEST_P(RowGradient, WhatIsNotANumberFillsItsRowAlone) {
  const Case c(random_logits(3, 100, DType::bf16), 1);
  const std::vector<int32_t> ids(3, -1);
  const std::vector<float> weights(3, 1);
  for (const RowNormalizer& bad :
       {RowNormalizer{1, nan_value}, RowNormalizer{nan_value, 1},
        RowNormalizer{HUGE_VALF, nan_value}, RowNormalizer{-HUGE_VALF, -HUGE_VALF}})
    for (const bool sloped : {false, true}) {
      std::vector<RowNormalizer> normalizers = c.normalizers();
      normalizers[1] = bad;
      std::vector<GradientCoefficients> coefficients = c.coefficients();
      if (!sloped) coefficients[1] = {0, 0};
      const Matrix got = apply(padded(c.rows, DType::f32), DType::bf16, false,
                               [&](ConstMatrixRef from, MatrixRef out) {
                                 kernels().gradient(from, {100, 1, 1}, normalizers, coefficients,
                                                    {ids, weights, 1, 0}, out);
                               });
      for (int64_t t = 0; t < 3; ++t)
        for (int64_t v = 0; v < 103; ++v)
          ASSERT_EQ(std::isnan(got.at(t, v)), t == 1 && v < 100) << t << ' ' << v;
    }
}

TEST_P(RowGradient, Property) {
  EXPECT_TRUE(rc::check("any shape, coefficients and token_ids", [&] {
    const auto columns = *rc::gen::inRange<int64_t>(1, 400);
    Case c(random_logits(3, columns, DType::bf16, *rc::gen::element(0.5, 2.0, 30.0),
                         *rc::gen::arbitrary<uint64_t>()),
           *rc::gen::inRange<int64_t>(0, 12));
    c.temperature = *rc::gen::element(0.5, 1.0, 3.0);
    for (int32_t& id : c.ids)
      id = *rc::gen::inRange<int32_t>(-1, static_cast<int32_t>(columns) + 1);
    for (double& x : c.g) x = *rc::gen::element(0.0, 1.0, -0.5, 100.0);
    const auto masked = *rc::gen::inRange<int64_t>(0, columns);
    for (int64_t v = 0; v < masked; ++v) c.rows.at(1, v) = none;
    const DType from = *rc::gen::element(DType::f32, DType::bf16);
    const DType to = *rc::gen::element(DType::f32, DType::bf16);
    RC_ASSERT(c.worst_share(differentiate(c, padded(c.rows, from), to, false), to) <= 1);
  }));
}

TEST_P(RowGradient, GoldenRows) {
  const double tolerance = 4 * logit_gradient_tolerance(DType::f32);
  const LogitRows rows = golden_logits();
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

TEST_P(RowGradient, GoldenRamp) {
  const auto expect = [&](std::vector<int32_t> ids, std::vector<double> g, double h,
                          const std::array<double, 5>& want) {
    const std::vector<double> got = gradient_of({0, 1, 2, 3, 4}, std::move(ids), std::move(g), h);
    for (size_t v = 0; v < 5; ++v)
      EXPECT_NEAR(got[v], want[v], 4 * logit_gradient_tolerance(DType::f32)) << "column " << v;
  };
  expect({}, {}, 1, {0.040236628, 0.077689574, 0.125053614, 0.105809309, -0.348789125});
  expect({9}, {2}, 0, {-0.023312462, -0.063369842, -0.172257089, -0.468243315, -1.272817293});
  expect({4, 4, 7}, {1, 2, 5}, 0,
         {-0.093249848, -0.253479366, -0.689028355, -1.872973258, -2.091269172});
}

}  // namespace gyre::test::row_kernels
