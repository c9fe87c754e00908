#pragma once
// Test problems of the fused linear layer, their results by definition in double precision, and the
// comparison of a rank's results with them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "logprob_cases.hpp"
#include "logprobs/fused_linear.hpp"
#include "logprobs/reference.hpp"
#include "report/tolerance.hpp"

namespace gyre::test::linear {

using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr double quiet_nan = std::numeric_limits<double>::quiet_NaN();

/// Hidden states, weight, targets and gradients of all tokens and ids; exact in `type`.
struct Problem {
  int64_t tokens, hidden, vocab_size;
  DType type;
  double temperature;
  LogitRows x, weight;  // [tokens, hidden], [vocab_size, hidden]
  Ints targets;
  Floats d_logprob, d_entropy;
};

inline Problem make_problem(int64_t tokens, int64_t hidden, int64_t vocab_size, DType type,
                            double temperature = 1) {
  Problem p{tokens,
            hidden,
            vocab_size,
            type,
            temperature,
            random_logits(tokens, hidden, type, 1, 3, TokenTensor::hidden),
            random_logits(vocab_size, hidden, type, 2 / std::sqrt(static_cast<double>(hidden)), 4,
                          TokenTensor::weight),
            {},
            {},
            {}};
  for (int64_t t = 0; t < tokens; ++t) {
    const auto bits = token_bits({5, TokenTensor::ids}, t, 0);
    p.targets.push_back(static_cast<int32_t>(bits % static_cast<uint64_t>(vocab_size)));
    p.d_logprob.push_back(0.25F * static_cast<float>(t % 5) - 0.5F);
    p.d_entropy.push_back(0.1F * static_cast<float>(t % 3) - 0.07F);
  }
  return p;
}

/// Logits of a token.
inline Doubles logits_of(const Problem& p, int64_t t) {
  Doubles z(static_cast<size_t>(p.vocab_size), 0);
  for (int64_t v = 0; v < p.vocab_size; ++v)
    for (size_t d = 0; d < static_cast<size_t>(p.hidden); ++d)
      z[static_cast<size_t>(v)] += p.x.row(t)[d] * p.weight.row(v)[d];
  return z;
}

/// Values and gradients by definition, and the sizes that errors are relative to.
struct Reference {
  Doubles logprob, entropy;            // [tokens]
  std::vector<Doubles> d_x, d_weight;  // [tokens][hidden], [vocab][hidden]
  Doubles d_x_size, d_weight_size;     // of a row
  double logit_size = 0;               // rms
};

/// Adds a term, a logit's gradient times the other factor, to a gradient and to its sum of squares.
inline void add_term(double g, double scale, std::span<const double> factor, Doubles& gradient,
                     double& squares) {
  double sum = 0;
  for (size_t d = 0; d < factor.size(); ++d) {
    gradient[d] += g * factor[d];
    sum += factor[d] * factor[d];
  }
  squares += scale * scale * sum / static_cast<double>(factor.size());
}

inline Reference make_reference(const Problem& p, bool entropies) {
  Reference r;
  r.d_x.assign(static_cast<size_t>(p.tokens), Doubles(static_cast<size_t>(p.hidden), 0));
  r.d_weight.assign(static_cast<size_t>(p.vocab_size), Doubles(static_cast<size_t>(p.hidden), 0));
  r.d_x_size.assign(r.d_x.size(), 0);
  r.d_weight_size.assign(r.d_weight.size(), 0);
  for (int64_t t = 0; t < p.tokens; ++t) {
    const auto at = static_cast<size_t>(t);
    const Doubles z = logits_of(p, t);
    for (const double x : z)
      r.logit_size +=
          x * x / (p.temperature * p.temperature * static_cast<double>(p.tokens * p.vocab_size));
    const int32_t target = p.targets[at];
    const TokenScore score = score_row_reference(z, target, p.temperature);
    r.logprob.push_back(score.logprob);
    r.entropy.push_back(score.entropy);
    const auto g = static_cast<double>(p.d_logprob[at]);
    const double h = entropies ? static_cast<double>(p.d_entropy[at]) : 0;
    if (g == 0 && h == 0) continue;
    const Doubles gradient =
        score_gradient_reference(z, std::span(&target, 1), std::span(&g, 1), h, p.temperature);
    const Doubles logprobs = log_softmax_reference(z, p.temperature);
    const double b = h / p.temperature,
                 a = (std::abs(g) + std::abs(h) * score.entropy) / p.temperature;
    for (size_t v = 0; v < z.size(); ++v) {
      const double weight = static_cast<int64_t>(v) == target ? std::abs(g) / p.temperature : 0;
      const double scale = logit_gradient_scale(logprobs[v], a, b, weight);
      add_term(gradient[v], scale, p.weight.row(static_cast<int64_t>(v)), r.d_x[at],
               r.d_x_size[at]);
      add_term(gradient[v], scale, p.x.row(t), r.d_weight[v], r.d_weight_size[v]);
    }
  }
  for (Doubles* sizes : {&r.d_x_size, &r.d_weight_size})
    for (double& size : *sizes) size = std::sqrt(size);
  r.logit_size = std::sqrt(r.logit_size);
  return r;
}

/// Results of a rank.
struct Result {
  Floats logprob, entropy;
  Matrix d_x, d_weight;
};

/// A rank's rows of X, in a matrix with gaps.
inline Matrix rows_of(const Problem& p, int64_t first, int64_t count) {
  Matrix x(count, p.hidden, p.type);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t d = 0; d < p.hidden; ++d) x.set(r, d, p.x.row(first + r)[static_cast<size_t>(d)]);
  return x;
}

/// A rank's columns of the logits, as rows of the weight. Padding is NaN.
inline Matrix weight_of(const Problem& p, const VocabPartition& vocab, int rank) {
  Matrix weight(vocab.columns(rank), p.hidden, p.type);
  for (int64_t c = 0; c < vocab.valid(rank); ++c)
    for (int64_t d = 0; d < p.hidden; ++d)
      weight.set(c, d, p.weight.row(vocab.begin(rank) + c)[static_cast<size_t>(d)]);
  return weight;
}

inline LinearOptions options_of(const Problem& p, bool sharded = true) {
  LinearOptions options;
  options.tokens = p.tokens;
  options.hidden = p.hidden;
  options.sharded = sharded;
  options.temperature = p.temperature;
  return options;
}

inline double worse(double a, double b) {
  return std::isnan(a) || std::isnan(b) ? quiet_nan : std::max(a, b);
}

inline void expect_scores(std::span<const float> got, const Doubles& want, double tolerance,
                          const std::function<double(double)>& scale) {
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  for (size_t t = 0; t < got.size(); ++t)
    worst = worse(worst,
                  std::abs(static_cast<double>(got[t]) - want[t]) / (tolerance * scale(want[t])));
  EXPECT_LE(worst, 1) << "err/tol of scores";
}

/// Compares rows of a gradient with row `row(r)` of the reference; for -1 the row must be 0.
inline void expect_rows(const Matrix& got, const std::vector<Doubles>& want, const Doubles& sizes,
                        double tolerance, const std::function<int64_t(int64_t)>& row,
                        const char* what) {
  double worst = 0;
  for (int64_t r = 0; r < got.rows(); ++r) {
    const int64_t at = row(r);
    for (int64_t d = 0; d < got.cols(); ++d) {
      if (at < 0) {
        EXPECT_EQ(got.at(r, d), 0) << what << " of padding";
        continue;
      }
      const auto i = static_cast<size_t>(at);
      worst = worse(worst, std::abs(got.at(r, d) - want[i][static_cast<size_t>(d)]) /
                               (tolerance * error_scale(want[i], sizes[i])));
    }
  }
  EXPECT_LE(worst, 1) << "err/tol of " << what;
}

/// `rounding`: tolerance for rounding the logits' gradients, if they are not f32.
inline void expect_result(const Problem& p, const Reference& want, const Result& got,
                          int64_t first_row, const VocabPartition& vocab, int rank,
                          double rounding = 0) {
  const double scores = linear_logprob_tolerance(p.hidden, want.logit_size);
  expect_scores(got.logprob, want.logprob, scores, logprob_scale);
  if (!got.entropy.empty())
    expect_scores(got.entropy, want.entropy, scores,
                  [&](double) { return entropy_scale(p.vocab_size); });
  expect_rows(
      got.d_x, want.d_x, want.d_x_size,
      linear_gradient_tolerance(p.hidden, p.vocab_size, want.logit_size) + rounding,
      [&](int64_t r) { return first_row + r; }, "dX");
  expect_rows(
      got.d_weight, want.d_weight, want.d_weight_size,
      linear_gradient_tolerance(p.hidden, p.tokens, want.logit_size) + rounding,
      [&](int64_t r) { return r < vocab.valid(rank) ? vocab.begin(rank) + r : -1; }, "dW");
}

/// First row of this rank, if `tokens` rows are divided over the group.
inline int64_t first_row_of(const Communicator& tp, int64_t tokens, bool sharded) {
  return sharded ? tokens / tp.size() * tp.rank() + std::min<int64_t>(tp.rank(), tokens % tp.size())
                 : 0;
}

}  // namespace gyre::test::linear
