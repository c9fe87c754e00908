#pragma once
// Log-softmax of rows, gradients through it, and of cross-entropies and filtered distributions, on
// every backend, against references in double precision.

#include "row_gradient_cases.hpp"

namespace gyre::test::row_kernels {

class RowTransform : public RowGradient {
 protected:
  /// Through the log-probabilities of all columns, from gradients `g` of them.
  void expect_log_softmax_gradient(const Case& c, const LogitRows& g, DType from, DType of_g,
                                   DType to) {
    const DeviceMatrix above(padded(g, of_g).ref(), stream());
    std::vector<float> sums;
    for (int64_t t = 0; t < g.tokens; ++t)
      sums.push_back(static_cast<float>(std::accumulate(g.row(t).begin(), g.row(t).end(), 0.0)));
    const auto run = [&](bool in_place) {
      return apply(
          padded(c.rows, from), to, in_place,
          [&](ConstMatrixRef logits, MatrixRef out) {
            kernels().log_softmax_gradient(logits, above.ref(), c.pass(), c.normalizers(), sums,
                                           out);
          },
          1);
    };
    const Matrix out = run(false), in_place = from == to ? run(true) : out;
    for (int64_t t = 0; t < g.tokens; ++t) {
      const auto want = log_softmax_gradient_reference(c.rows.row(t), g.row(t), c.temperature);
      const auto logprob = log_softmax_reference(c.rows.row(t), c.temperature);
      double sizes = 0;
      for (const double x : g.row(t)) sizes += std::abs(x / c.temperature);
      for (int64_t v = 0; v < out.cols(); ++v) {
        ASSERT_EQ(out.at(t, v), in_place.at(t, v));
        const auto id = static_cast<size_t>(v);
        if (v >= g.vocab_size)
          ASSERT_EQ(out.at(t, v), 0) << "padding";
        else
          ASSERT_NEAR(out.at(t, v), want[id],
                      logit_gradient_tolerance(to) *
                          logit_gradient_scale(logprob[id], sizes, 0,
                                               std::abs(g.row(t)[id] / c.temperature)))
              << t << ' ' << v;
      }
    }
  }
  Matrix log_softmax(const Case& c, DType from, DType to, bool exponentiate) {
    return apply(
        padded(c.rows, from), to, from == to,
        [&](ConstMatrixRef logits, MatrixRef out) {
          kernels().log_softmax(logits, c.pass(), c.normalizers(), exponentiate, out);
        },
        1);
  }
  /// Elements within `tolerance` of `want`, and padding of 0.
  static void expect_row(const Matrix& got, int64_t t, const std::vector<double>& want,
                         const std::function<double(size_t)>& tolerance) {
    for (int64_t v = 0; v < got.cols(); ++v) {
      const auto id = static_cast<size_t>(v);
      const bool padding = id >= want.size();
      ASSERT_LE(share_of(got.at(t, v), padding ? 0 : want[id], padding ? 0 : tolerance(id)), 1)
          << "row " << t << ", column " << v;
    }
  }
};

TEST_P(RowTransform, GradientsThroughLogSoftmax) {
  on_every_target([&] {
    for (const int64_t columns : pick<int64_t>({1, 2, 31, 64, 101, 1001}, {1, 2, 33, 700, 9001}))
      for (const double temperature : pick<double>({1.0, 0.3, 20.0}, {2.0})) {
        Case c(random_logits(4, columns, DType::bf16, 4), 0);
        c.temperature = temperature;
        for (int64_t v = 0; v + 1 < columns; v += 3) c.rows.at(2, v) = none;
        LogitRows g = random_logits(4, columns, DType::bf16, 1, 9, TokenTensor::d_logprobs);
        for (int64_t v = 0; v < columns; ++v) g.at(1, v) = 0;
        for (const DType of_g : both_types)
          for_types_and_columns({columns}, [&](DType from, DType to, int64_t) {
            expect_log_softmax_gradient(c, g, from, of_g, to);
          });
      }
  });
}

TEST_P(RowTransform, GradientsThroughLogSoftmaxOfNoDistributionAreNaN) {
  on_every_target([&] {
    const Matrix logits = padded(random_logits(3, 40, DType::bf16), DType::f32);
    const DeviceMatrix above(logits.ref(), stream());
    const std::vector<RowNormalizer> normalizers = {{0, 1}, {0, nan_value}, {-HUGE_VALF, 0}};
    const Matrix out = apply(logits, DType::bf16, false, [&](ConstMatrixRef from, MatrixRef to) {
      kernels().log_softmax_gradient(from, above.ref(), {40, 1, 1}, normalizers,
                                     std::vector<float>(3, 1), to);
    });
    for (int64_t t = 0; t < 3; ++t)
      for (int64_t v = 0; v < 43; ++v) ASSERT_EQ(std::isnan(out.at(t, v)), t > 0 && v < 40);
  });
}

TEST_P(RowTransform, LogSoftmaxAndProbabilities) {
  on_every_target([&] {
    for_types_and_columns({1, 31, 64, 1103}, [&](DType from, DType to, int64_t columns) {
      for (const double offset : {0.0, 1e4}) {
        Case c(random_logits(3, columns, DType::bf16), 0);
        c.temperature = 1.5;
        for (double& z : c.rows.values) z = stored(z + offset, DType::bf16);
        if (columns > 1) c.rows.at(1, 0) = none;
        const Matrix logs = log_softmax(c, from, to, false),
                     values = log_softmax(c, from, to, true);
        for (int64_t t = 0; t < 3; ++t) {
          std::vector<double> want = log_softmax_reference(c.rows.row(t), 1.5);
          want.resize(columns + 3, none);
          for (int64_t v = 0; v < columns + 3; ++v) {
            const double log_p = want[v];
            const double tolerance = log_p == none ? 0 : logit_gradient_tolerance(to);
            ASSERT_LE(share_of(logs.at(t, v), log_p, tolerance * logprob_scale(log_p)), 1) << v;
            ASSERT_LE(share_of(values.at(t, v), std::exp(log_p),
                               tolerance * logit_gradient_scale(log_p, 1, 0, 0)),
                      1)
                << v;
          }
        }
      }
    });
  });
}

TEST_P(RowTransform, ExponentialIsAccurate) {
  on_every_target([&] {
    LogitRows rows(1, 20000);
    for (int64_t v = 0; v < 20000; ++v)
      rows.at(0, v) = stored(-0.0011 * static_cast<double>(v), DType::f32);
    const Matrix got = apply(padded(rows, DType::f32), DType::f32, true,
                             [&](ConstMatrixRef logits, MatrixRef out) {
                               kernels().log_softmax(logits, {20000, 1, 1},
                                                     std::vector<RowNormalizer>{{0, 0}}, true, out);
                             });
    double worst = 0;
    for (int64_t v = 0; v < 20000; ++v) {
      const double z = rows.at(0, v);
      // One rounding, and the one of the exponent at its size.
      const double tolerance = tolerance_for(DType::f32, 1) * (1 + std::abs(z));
      worst = std::max(worst, std::abs(got.at(0, v) / std::exp(z) - 1) / tolerance);
    }
    EXPECT_LE(worst, 1);
  });
}

TEST_P(RowTransform, LogSoftmaxOfWhatIsNotANumberFillsItsRow) {
  for (const bool exponentiate : {false, true}) {
    const Matrix got = apply(
        Matrix(1, 5, DType::f32), DType::f32, true, [&](ConstMatrixRef logits, MatrixRef out) {
          kernels().log_softmax(logits, {4, 1, 1}, std::vector<RowNormalizer>{{1, nan_value}},
                                exponentiate, out);
        });
    for (int64_t v = 0; v < 4; ++v) EXPECT_TRUE(std::isnan(got.at(0, v)));
    EXPECT_EQ(got.at(0, 4), exponentiate ? 0 : none);
  }
}

TEST_P(RowTransform, CrossGradientsMatchTheReferenceForAllTypes) {
  const std::vector<float> g = {1, -2, 0.5, 0};
  const auto check = [&](DType s, DType t, DType to, int64_t columns) {
    Case student(random_logits(4, columns, DType::bf16), 0),
        teacher(random_logits(4, columns, DType::bf16, 2, 7), 0);
    if (columns > 1) student.rows.at(1, 1) = teacher.rows.at(1, 1) = teacher.rows.at(2, 0) = none;
    const DeviceMatrix teachers(padded(teacher.rows, t).ref(), stream());
    const Matrix got = apply(
        padded(student.rows, s), to, s == to,
        [&](ConstMatrixRef logits, MatrixRef out) {
          kernels().cross_gradient(logits, teachers.ref(), {columns, 1, 1}, student.normalizers(),
                                   teacher.normalizers(), g, out);
        },
        1);
    for (int64_t r = 0; r < 4; ++r) {
      const auto factor = static_cast<double>(g[r]);
      const auto log_q = log_softmax_reference(student.rows.row(r)),
                 log_p = log_softmax_reference(teacher.rows.row(r));
      expect_row(
          got, r,
          soft_cross_entropy_gradient_reference(student.rows.row(r), teacher.rows.row(r), factor),
          [&](size_t id) {
            return logit_gradient_tolerance(to) * (logit_gradient_scale(log_q[id], factor, 0, 0) +
                                                   logit_gradient_scale(log_p[id], factor, 0, 0));
          });
    }
  };
  on_every_target([&] {
    for (const DType t : both_types)
      for_types_and_columns(pick<int64_t>({1, 33, 500}, {1, 33, 700, 9001}),
                            [&](DType s, DType to, int64_t columns) { check(s, t, to, columns); });
  });
}

TEST_P(RowTransform, CrossGradientsOfRowsWithoutGradientReadNothingAndOthersKeepNaN) {
  const DeviceMatrix teacher(2, 40, DType::f32, stream());
  const std::vector<RowNormalizer> good(2, {0, 0}), bad(2, {0, nan_value});
  for (const bool bad_teacher : {false, true}) {
    const Matrix got = apply(
        Matrix(2, 40, DType::f32), DType::f32, true, [&](ConstMatrixRef student, MatrixRef out) {
          kernels().cross_gradient(student, teacher.ref(), {38, 1, 1}, bad_teacher ? good : bad,
                                   bad_teacher ? bad : good, std::vector<float>{0, 1}, out);
        });
    for (int64_t v = 0; v < 40; ++v) {
      EXPECT_EQ(got.at(0, v), 0);
      EXPECT_EQ(std::isnan(got.at(1, v)), v < 38);
    }
  }
}

TEST_P(RowTransform, FilteredGradientsMatchTheReference) {
  const std::vector<int32_t> ids = {1003, 1066, 1050, 1010};  // dropped or not; -inf
  const std::vector<float> a = {-1, 0.5, -2, 0}, weights = {1, -0.5, 2, 3};
  const auto check = [&](DType from, DType to, int64_t columns, int64_t cut) {
    SCOPED_TRACE(cut);
    LogitRows rows(4, columns);  // small integers: many ties
    for (int64_t t = 0; t < 4; ++t)
      for (int64_t v = 0; v < columns; ++v)
        rows.at(t, v) = static_cast<double>((v * 37 + t * 11) % 10) - 4;
    rows.at(2, 50) = none;
    LogitRows left = rows;
    for (int64_t t = 0; t < 4; ++t)
      for (int64_t v = 0; v < columns; ++v)
        if (rows.at(t, v) < 2 || (rows.at(t, v) == 2 && v < cut)) left.at(t, v) = none;
    const Case kept(left, 0);
    const std::vector<RowSurvivors> survivors(4, {2, static_cast<int32_t>(cut)});
    const Matrix got = apply(
        padded(rows, from), to, from == to,
        [&](ConstMatrixRef logits, MatrixRef out) {
          kernels().filtered_gradient(logits, {columns, 1, 1}, kept.normalizers(), survivors, a,
                                      {ids, weights, 1, 1000}, out);
        },
        1);
    for (int64_t t = 0; t < 4; ++t) {
      const auto slope = static_cast<double>(a[t]);
      const auto at = static_cast<size_t>(ids[t] - 1000);
      const auto weight = static_cast<double>(weights[t]);
      const std::vector<double> log_p = log_softmax_reference(left.row(t));
      std::vector<double> want;
      for (size_t v = 0; v < log_p.size(); ++v)
        want.push_back(log_p[v] == none ? 0 : slope * std::exp(log_p[v]) + (v == at ? weight : 0));
      expect_row(got, t, want, [&](size_t v) {
        if (log_p[v] == none) return 0.0;  // dropped: exactly 0
        return logit_gradient_tolerance(to) *
               logit_gradient_scale(log_p[v], slope, 0, v == at ? std::abs(weight) : 0);
      });
    }
  };
  on_every_target([&] {
    for_types_and_columns({103}, [&](DType from, DType to, int64_t columns) {
      for (const int64_t cut : {-5, 0, 1, 8, 17, 32, 35, 42, 70, 100, 120, 1000})
        check(from, to, columns, cut);
    });
  });
  for_types_and_columns({17001}, [&](DType from, DType to, int64_t columns) {
    for (const int64_t cut : {5, 4103, 16389}) check(from, to, columns, cut);
  });
}

TEST_P(RowTransform, FilteredGradientsOfRowsWithoutGradientReadNothingAndOthersKeepNaN) {
  const std::vector<RowNormalizer> bad(2, {0, nan_value});
  const std::vector<RowSurvivors> survivors(2, {nan_value, 0});
  const std::vector<float> a = {0, 1}, weights = {0, 1};
  const std::vector<int32_t> ids = {3, 3};
  const Matrix got = apply(Matrix(2, 40, DType::bf16), DType::bf16, true,
                           [&](ConstMatrixRef logits, MatrixRef out) {
                             kernels().filtered_gradient(logits, {38, 1, 1}, bad, survivors, a,
                                                         {ids, weights, 1, 0}, out);
                           });
  for (int64_t v = 0; v < 40; ++v) {
    EXPECT_EQ(got.at(0, v), 0);
    EXPECT_EQ(std::isnan(got.at(1, v)), v < 38);
  }
}

TEST_P(RowTransform, ScatterAddsUpAndGatherTakesWhatTheShardHas) {
  const std::vector<int32_t> ids = {100, 101, 100, 146, 147, 99, -1, 500, 146, 146, 146, 120};
  std::vector<float> weights(12);
  std::iota(weights.begin(), weights.end(), 1.0F);
  const LogitRows rows = random_logits(3, 47, DType::bf16);
  for (const DType type : both_types) {
    LogitRows want(3, 50);
    std::vector<float> values(12, -77), expected = values;
    for (size_t i = 0; i < ids.size(); ++i)
      if (const int64_t t = static_cast<int64_t>(i) / 4, v = ids[i] - 100; v >= 0 && v < 47) {
        want.at(t, v) += static_cast<double>(weights[i]);
        expected[i] = static_cast<float>(rows.row(t)[v]);
      }
    DeviceMatrix out(3, 50, type, stream());
    kernels().scatter_token_weights({ids, weights, 4, 100}, 47, out.ref(), 2);
    const Matrix got = out.host();
    for (int64_t t = 0; t < 3; ++t)
      for (int64_t v = 0; v < 50; ++v) EXPECT_EQ(got.at(t, v), want.at(t, v)) << t << ' ' << v;
    const DeviceMatrix logits(padded(rows, type).ref(), stream());
    kernels().gather_token_logits(logits.ref(), ids, 4, 100, 47, values);
    EXPECT_EQ(values, expected);
  }
  kernels().gather_token_logits({nullptr, DType::f32, 3, 0, 0}, {}, 0, 0, 0, {});
}

}  // namespace gyre::test::row_kernels
