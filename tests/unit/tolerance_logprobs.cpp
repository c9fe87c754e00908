// Tolerances of log-probabilities, measured: how much of them a plain f32 computation uses, and
// what they notice; answers that a close call of a filter decides.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "apps/logprobs/operation.hpp"
#include "apps/logprobs/ops/filtered_row.hpp"
#include "core/bf16.hpp"
#include "core/tolerance.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/tolerance.hpp"

namespace gyre {
namespace GYRE_FILE {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

size_t at(int64_t i) {
  return static_cast<size_t>(i);
}

Doubles wide(const Floats& values) {
  return {values.begin(), values.end()};
}

Floats normal(int64_t count, float size, unsigned seed) {
  std::minstd_rand random(seed);
  std::normal_distribution<float> draw(0, 1);
  Floats values(at(count));
  for (float& x : values) x = size * draw(random);
  return values;
}

/// The largest error over what it may be.
struct Share {
  double most = 0;
  void add(float got, double want, double tolerance) {
    const double error = std::abs(static_cast<double>(got) - want) / tolerance;
    most = std::isnan(error) ? HUGE_VAL : std::max(most, error);
  }
};

/// One row in f32, one column after the other; sums in f64 over runs of row_roundings. A column
/// `left_out` >= 0 is overlooked.
struct PlainRow {
  float max = -std::numeric_limits<float>::infinity();
  float log_sum = 0, entropy = 0;

  explicit PlainRow(const Floats& z, int64_t left_out = -1) {
    for (const float x : z) max = std::max(max, x);
    double sum = 0, weighted = 0;
    for (int64_t begin = 0; begin < std::ssize(z); begin += row_roundings) {
      float s = 0, t = 0;
      for (int64_t v = begin; v < std::min<int64_t>(std::ssize(z), begin + row_roundings); ++v) {
        if (v == left_out) continue;
        const float x = z[at(v)] - max;
        s += std::exp(x);
        t += x * std::exp(x);
      }
      sum += static_cast<double>(s);
      weighted += static_cast<double>(t);
    }
    log_sum = static_cast<float>(std::log(sum));
    entropy = static_cast<float>(std::log(sum) - weighted / sum);
  }
  float logprob(float z) const { return z - max - log_sum; }
};

/// Shares that a row uses: of log-probabilities, the entropy, and the gradient for one target.
struct RowShares {
  Share logprob, entropy, gradient, gradient_bf16;

  void add(const Floats& z, int64_t target, float g, float h, int64_t left_out = -1) {
    const PlainRow row(z, left_out);
    const Doubles row64 = wide(z), logp = log_softmax_reference(row64);
    const double want_h = score_row_reference(row64, target).entropy;
    const std::vector<int32_t> ids{static_cast<int32_t>(target)};
    const double g64 = static_cast<double>(g), h64 = static_cast<double>(h);
    const Doubles dz = score_gradient_reference(row64, ids, Doubles{g64}, h64);
    entropy.add(row.entropy, want_h, logprob_tolerance() * entropy_scale(std::ssize(z)));
    const float a = -(g + h * row.entropy), b = -h;
    for (int64_t v = 0; v < std::ssize(z); ++v) {
      const double want = logp[at(v)];
      const float lp = row.logprob(z[at(v)]), weight = v == target ? g : 0;
      const float got = std::exp(lp) * (a + b * lp) + weight;
      const double scale = logit_gradient_scale(want, -(g64 + h64 * want_h), -h64,
                                                std::abs(static_cast<double>(weight)));
      logprob.add(lp, want, logprob_tolerance() * logprob_scale(want));
      gradient.add(got, dz[at(v)], logit_gradient_tolerance(DType::f32) * scale);
      gradient_bf16.add(to_float(to_bf16(got)), dz[at(v)],
                        logit_gradient_tolerance(DType::bf16) * scale);
    }
  }
};

TEST(LogprobTolerance, ShareOfAPlainComputation) {
  RowShares shares;
  unsigned seed = 1;
  for (const int64_t columns : {1, 2, 100, 5000, 151936})
    for (const float size : {0.0F, 1.0F, 4.0F, 20.0F})
      for (const float h : {0.0F, 0.7F, -3.0F}) {
        Floats z = normal(columns, size, ++seed);
        shares.add(z, columns / 2, 1.3F, h);
        for (float& x : z) x += 1000;
        shares.add(z, columns / 2, -0.2F, h);
      }
  for (const Share& share : {shares.logprob, shares.entropy, shares.gradient}) {
    EXPECT_LT(share.most, 0.3);
    EXPECT_GT(share.most, 0.005);
  }
  EXPECT_LT(shares.gradient_bf16.most, 0.5);
  EXPECT_GT(shares.gradient_bf16.most, 0.05);
}

// The gradient of the entropy alone: log p, a and with it all that the gradient is made of vanish,
// but the rounding of the entropy does not.
TEST(LogprobTolerance, ARowThatIsNearlyCertain) {
  RowShares shares;
  for (float margin = 0; margin < 40; margin += 0.37F) {
    Floats z = normal(1000, 1, 77);
    z[5] = 8 + margin;
    shares.add(z, 7, 0, 2);
    shares.add(z, 5, 1, 2);
    shares.add(z, 5, -1, 0.5F);
  }
  EXPECT_LT(shares.entropy.most, 0.3);
  EXPECT_LT(shares.gradient.most, 0.3);
  EXPECT_GT(shares.gradient.most, 0.02);
}

TEST(LogprobTolerance, OneOf32KColumnsIsNoticed) {
  const Floats z(32768, 0.5F);
  RowShares shares;
  shares.add(z, 9, 1, 0, 20000);
  EXPECT_GT(shares.logprob.most, 2);
  const double error = -std::log1p(-1.0 / 32768);
  EXPECT_GT(error, 5.9 * logprob_tolerance());
  EXPECT_LT(error, 6.1 * logprob_tolerance());
  EXPECT_GT(shares.gradient.most, 0.3);
  RowShares of_entropy;
  of_entropy.add(z, 9, 0, 1, 20000);
  EXPECT_GT(of_entropy.entropy.most, 0.3);
}

TEST(LogprobTolerance, Scales) {
  const double infinity = HUGE_VAL;
  EXPECT_EQ(logprob_tolerance(), tolerance_for(DType::f32, row_roundings));
  EXPECT_EQ(logprob_scale(0), 1);
  EXPECT_DOUBLE_EQ(logprob_scale(-4), std::sqrt(2.0));
  EXPECT_NEAR(logprob_scale(-4000), 1000, 1e-3);
  EXPECT_EQ(entropy_scale(1), 1);
  EXPECT_DOUBLE_EQ(entropy_scale(1000), std::log(1000.0));
  EXPECT_EQ(logit_gradient_tolerance(DType::f32), logprob_tolerance());
  EXPECT_DOUBLE_EQ(logit_gradient_tolerance(DType::bf16),
                   std::hypot(logprob_tolerance(), tolerance_for(DType::bf16, 1)));
  EXPECT_DOUBLE_EQ(logit_gradient_scale(0, -3, 0, 0), 3);
  EXPECT_DOUBLE_EQ(logit_gradient_scale(0, 0, -2, 0), 2);
  EXPECT_DOUBLE_EQ(logit_gradient_scale(0, 0, 0, 0.25), 0.25);
  EXPECT_DOUBLE_EQ(logit_gradient_scale(-0.5, 1, -2, 0.25), std::exp(-0.5) * 3 * 1.5 + 0.25);
  EXPECT_DOUBLE_EQ(logit_gradient_scale(-4, 1, 2, 0), std::exp(-4) * 9 * 5);
  EXPECT_EQ(logit_gradient_scale(-infinity, 1, 1, 0.5), 0.5);
  EXPECT_EQ(logit_gradient_scale(-infinity, 1, 1, 0), 0x1p-80);
  EXPECT_EQ(logit_gradient_scale(-1000, 1, 1, 0), 0x1p-80);
}

/// Normal hidden states and weights, and one target a row; gradients of the log-probabilities.
struct Linear {
  int64_t tokens, hidden, vocab;
  float size;  ///< of logits
  Floats x = normal(tokens * hidden, 1, 3);
  Floats w = normal(vocab * hidden, size / std::sqrt(static_cast<float>(hidden)), 4);
  Floats g = normal(tokens, 1, 5);

  /// Z in T, `left_out` of the hidden dimensions overlooked.
  template <class T>
  std::vector<T> logits(int64_t token, int64_t left_out) const {
    std::vector<T> z(at(vocab));
    for (int64_t v = 0; v < vocab; ++v)
      for (int64_t d = 0; d < hidden; ++d)
        if (d != left_out)
          z[at(v)] +=
              static_cast<T>(x[at(token * hidden + d)]) * static_cast<T>(w[at(v * hidden + d)]);
    return z;
  }
};

struct LinearShares {
  Share logprob, d_x, d_w;
};

/// What of a plain computation to overlook: a hidden dimension of logits, a column of dX, a token
/// of dW.
struct LeftOut {
  int64_t dimension = -1, column = -1, token = -1;
};

LinearShares shares_of(const Linear& c, const LeftOut& left_out = {}) {
  LinearShares shares;
  const double size = static_cast<double>(c.size);
  Floats d_w(c.w.size());
  Doubles want_w(c.w.size()), squares_w(c.w.size());
  for (int64_t t = 0; t < c.tokens; ++t) {
    const auto id = static_cast<int32_t>(t % c.vocab);
    const Floats z = c.logits<float>(t, left_out.dimension);
    const Doubles z64 = c.logits<double>(t, -1), logp = log_softmax_reference(z64);
    const PlainRow row(z);
    shares.logprob.add(row.logprob(z[at(id)]), logp[at(id)],
                       linear_logprob_tolerance(c.hidden, size) * logprob_scale(logp[at(id)]));
    Floats d_x(at(c.hidden));
    Doubles want_x(at(c.hidden)), squares_x(at(c.hidden));
    const float g = c.g[at(t)];
    const auto g64 = static_cast<double>(g);
    for (int64_t v = 0; v < c.vocab; ++v) {
      const float dz = -g * std::exp(row.logprob(z[at(v)])) + (v == id ? g : 0);
      const double dz64 = -g64 * std::exp(logp[at(v)]) + (v == id ? g64 : 0);
      const double scale = logit_gradient_scale(logp[at(v)], -g64, 0, v == id ? std::abs(g64) : 0);
      for (int64_t d = 0; d < c.hidden; ++d) {
        const size_t of_w = at(v * c.hidden + d), of_x = at(t * c.hidden + d);
        const auto w64 = static_cast<double>(c.w[of_w]), x64 = static_cast<double>(c.x[of_x]);
        if (v != left_out.column) d_x[at(d)] += dz * c.w[of_w];
        if (t != left_out.token) d_w[of_w] += dz * c.x[of_x];
        want_x[at(d)] += dz64 * w64, squares_x[at(d)] += std::pow(scale * w64, 2);
        want_w[of_w] += dz64 * x64, squares_w[of_w] += std::pow(scale * x64, 2);
      }
    }
    const double most = *std::max_element(squares_x.begin(), squares_x.end());
    const double tolerance =
        linear_gradient_tolerance(c.hidden, c.vocab, size) * error_scale(want_x, std::sqrt(most));
    for (size_t d = 0; d < d_x.size(); ++d) shares.d_x.add(d_x[d], want_x[d], tolerance);
  }
  for (int64_t v = 0; v < c.vocab; ++v) {
    const auto row = std::span(want_w).subspan(at(v * c.hidden), at(c.hidden));
    const auto squares = squares_w.begin() + v * c.hidden;
    const double most = *std::max_element(squares, squares + c.hidden);
    const double tolerance =
        linear_gradient_tolerance(c.hidden, c.tokens, size) * error_scale(row, std::sqrt(most));
    for (int64_t d = 0; d < c.hidden; ++d)
      shares.d_w.add(d_w[at(v * c.hidden + d)], row[at(d)], tolerance);
  }
  return shares;
}

TEST(LinearTolerance, ShareOfAPlainComputation) {
  for (const float size : {0.5F, 2.0F, 8.0F})
    for (const Linear& c : {Linear{40, 64, 300, size}, Linear{3, 1000, 50, size}}) {
      const LinearShares shares = shares_of(c);
      for (const Share& share : {shares.logprob, shares.d_x, shares.d_w}) {
        EXPECT_LT(share.most, 0.3) << size << " hidden " << c.hidden;
        EXPECT_GT(share.most, 0.001) << size << " hidden " << c.hidden;
      }
    }
}

TEST(LinearTolerance, WhatIsLeftOutIsNoticed) {
  const Linear c{40, 64, 300, 2};
  EXPECT_GT(shares_of(c, {.dimension = 9}).logprob.most, 1000);
  EXPECT_GT(shares_of(c, {.dimension = 9}).d_x.most, 1000);
  EXPECT_GT(shares_of(c, {.column = 250}).d_x.most, 100);
  EXPECT_GT(shares_of(c, {.token = 20}).d_w.most, 100);
}

TEST(LinearTolerance, Sums) {
  const auto f32 = [](int64_t roundings) { return tolerance_for(DType::f32, roundings); };
  EXPECT_DOUBLE_EQ(linear_logprob_tolerance(256, 0.5), f32(256) + logprob_tolerance());
  EXPECT_DOUBLE_EQ(linear_logprob_tolerance(256, 3), 3 * f32(256) + logprob_tolerance());
  EXPECT_DOUBLE_EQ(linear_gradient_tolerance(256, 900, 3),
                   3 * f32(256) + logprob_tolerance() + f32(900));
}

// What filtered results and answers are held against where rounding decides how many survive.

constexpr double slope = -0.5;

/// Probabilities of a half, a quarter, two eighths and two of next to nothing: whether two or three
/// reach 0.75 is a matter of rounding.
const Doubles close_row{std::log(1e-7), std::log(2), std::log(0.5), std::log(0.5), 0, -HUGE_VAL};
const SamplingFilter close_filter{.top_p = 0.75};
const std::vector<int32_t> all_ids{-1, 0, 1, 2, 3, 4, 5};

double logprob_of(int32_t id, int64_t survivors) {
  return SurvivorsReference(close_row, close_filter, 1e-5).logprob(id, survivors);
}
Doubles gradient_of(int32_t id, int64_t survivors) {
  Doubles gradient;
  for (int32_t v = 0; v < std::ssize(close_row); ++v)
    gradient.push_back(-slope * std::exp(logprob_of(v, survivors)));
  if (id >= 0 && logprob_of(id, survivors) > -HUGE_VAL) gradient[id] += slope;
  return gradient;
}

bool passes(const Doubles& got, const Doubles& answer, const ExpectedRow& want, double tolerance) {
  ResultArray array{"array", {1, std::ssize(got)}, "check"};
  array.rows = {0};
  Check check("check", tolerance);
  compare_row(array, 0, got, want, answer.empty() ? nullptr : answer.data(), check);
  return check.passed();
}
/// A log-probability, and the answers of a file, which `answer` may replace.
bool score_passes(int32_t id, double got, double answer, const Doubles& gradient) {
  const FilteredRow row(close_row, close_filter, id, slope);
  return passes({got}, {answer}, row.score(got, {answer, gradient}), logprob_tolerance());
}
bool gradient_passes(int32_t id, int64_t survivors, const Doubles& got, double answer,
                     const Doubles& gradient) {
  const FilteredRow row(close_row, close_filter, id, slope);
  return passes(got, gradient, row.gradient(survivors, {answer, gradient}),
                logit_gradient_tolerance(DType::f32));
}

/// Calls body(id, survivors of the result, survivors of the answers).
template <class Body>
void for_each_case(Body body) {
  for (const int32_t id : all_ids)
    for (const int64_t mine : {2, 3})
      for (const int64_t other : {2, 3}) {
        SCOPED_TRACE(testing::Message() << id << ' ' << mine << ' ' << other);
        body(id, mine, other);
      }
}

TEST(FilteredRow, ResultsAndAnswersMayHaveEitherNumberOfSurvivors) {
  for_each_case([](int32_t id, int64_t mine, int64_t other) {
    const Doubles gradient = gradient_of(id, other);
    EXPECT_TRUE(score_passes(id, logprob_of(id, mine), logprob_of(id, other), {}));
    EXPECT_TRUE(score_passes(id, logprob_of(id, mine), logprob_of(id, other), gradient));
    EXPECT_TRUE(gradient_passes(id, mine, gradient_of(id, mine), logprob_of(id, other), gradient));
  });
}

TEST(FilteredRow, EveryAnswerThatIsChangedIsNoticed) {
  for_each_case([](int32_t id, int64_t mine, int64_t other) {
    const double got = logprob_of(id, mine), answer = logprob_of(id, other);
    const Doubles gradient = gradient_of(id, other);
    for (const double wrong : {answer + 1, answer - 1e-3, answer > -HUGE_VAL ? -HUGE_VAL : -1.0}) {
      if (wrong == answer) continue;
      EXPECT_FALSE(score_passes(id, got, wrong, gradient)) << wrong;
    }
    for (size_t v = 0; v < gradient.size(); ++v)
      for (const double wrong : {gradient[v] + 1e-3, gradient[v] == 0 ? 1e-6 : 0.0}) {
        Doubles changed = gradient;
        changed[v] = wrong;
        EXPECT_FALSE(gradient_passes(id, mine, gradient_of(id, mine), answer, changed)) << v;
      }
  });
}

TEST(FilteredRow, EveryResultThatIsChangedIsNoticed) {
  for_each_case([](int32_t id, int64_t mine, int64_t other) {
    const double got = logprob_of(id, mine), answer = logprob_of(id, other);
    EXPECT_FALSE(score_passes(id, got > -HUGE_VAL ? got + 1e-3 : -1, answer, {}));
    const Doubles gradient = gradient_of(id, mine);
    for (size_t v = 0; v < gradient.size(); ++v)
      for (const double wrong : {gradient[v] + 1e-3, gradient[v] == 0 ? 1e-6 : 0.0}) {
        Doubles changed = gradient;
        changed[v] = wrong;
        EXPECT_FALSE(gradient_passes(id, mine, changed, answer, gradient_of(id, other))) << v;
      }
    // The other number's gradient is right, and not of this result.
    EXPECT_FALSE(gradient_passes(id, mine, gradient_of(id, 5 - mine), answer, {}));
  });
}

TEST(FilteredRow, SurvivorsAreCountedAndScoredTogether) {
  const FilteredRow row(close_row, close_filter, 4, slope);
  const auto passes = [&](int64_t survivors, double got) {
    Check check("check", logprob_tolerance());
    row.compare_survivors(survivors, got, false, "token 7", check);
    return check.passed();
  };
  EXPECT_TRUE(passes(2, logprob_of(4, 2)) && passes(3, logprob_of(4, 3)));
  EXPECT_FALSE(passes(2, logprob_of(4, 3)) || passes(3, logprob_of(4, 2)));
  EXPECT_FALSE(passes(1, -HUGE_VAL) || passes(4, logprob_of(4, 3)));
}

// Two equal logits, of which one survives. The gradient of the other one may stand in its place, to
// half a unit of the stored type; 1 % more is wrong.
TEST(FilteredRow, AGradientOfAnotherTieIsRightToTheLastBit) {
  const FilteredRow row({0, 1, 1}, {.top_p = 0.3}, 2, slope);
  const double p = 1, right = slope - slope * p, other = -slope * p;
  EXPECT_EQ(right, 0);
  for (const DType stored : {DType::f32, DType::bf16}) {
    EXPECT_TRUE(row.is_other_gradient(stored, 1, other, 0));
    EXPECT_TRUE(row.is_other_gradient(stored, 1, 0, other));
    EXPECT_FALSE(row.is_other_gradient(stored, 1, 1.01 * other, 0)) << name_of(stored);
    EXPECT_FALSE(row.is_other_gradient(stored, 0, other, 0)) << "not a tie";
  }
  EXPECT_TRUE(row.is_other_gradient(DType::bf16, 1, other * (1 + 0x1p-8), 0));
  EXPECT_FALSE(row.is_other_gradient(DType::f32, 1, other * (1 + 0x1p-8), 0));
}

}  // namespace GYRE_FILE
}  // namespace gyre
