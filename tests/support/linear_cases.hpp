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

#include "core/tolerance.hpp"
#include "logprob_cases.hpp"
#include "logprobs/fused_linear/fused_linear.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/tolerance.hpp"
#include "score_checks.hpp"

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
  Doubles temperatures = {};  // of tokens; empty: that of all

  double heat(int64_t token) const {
    return temperatures.empty() ? temperature : temperatures[token];
  }
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
  Doubles z(p.vocab_size, 0);
  for (int64_t v = 0; v < p.vocab_size; ++v)
    for (size_t d = 0; d < static_cast<size_t>(p.hidden); ++d)
      z[v] += p.x.row(t)[d] * p.weight.row(v)[d];
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
  r.d_x.assign(p.tokens, Doubles(p.hidden, 0));
  r.d_weight.assign(p.vocab_size, Doubles(p.hidden, 0));
  r.d_x_size.assign(r.d_x.size(), 0);
  r.d_weight_size.assign(r.d_weight.size(), 0);
  for (int64_t t = 0; t < p.tokens; ++t) {
    const int64_t at = t;
    const Doubles z = logits_of(p, t);
    const double heat = p.heat(t);
    for (const double x : z)
      r.logit_size += x * x / (heat * heat * static_cast<double>(p.tokens * p.vocab_size));
    const int32_t target = p.targets[at];
    const TokenScore score = score_row_reference(z, target, heat);
    r.logprob.push_back(score.logprob);
    r.entropy.push_back(score.entropy);
    const auto g = static_cast<double>(p.d_logprob[at]);
    const double h = entropies ? static_cast<double>(p.d_entropy[at]) : 0;
    if (g == 0 && h == 0) continue;
    const Doubles gradient =
        score_gradient_reference(z, std::span(&target, 1), std::span(&g, 1), h, heat);
    const Doubles logprobs = log_softmax_reference(z, heat);
    const double b = h / heat, a = (std::abs(g) + std::abs(h) * score.entropy) / heat;
    for (size_t v = 0; v < z.size(); ++v) {
      const double weight = static_cast<int64_t>(v) == target ? std::abs(g) / heat : 0;
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
    for (int64_t d = 0; d < p.hidden; ++d) x.set(r, d, p.x.row(first + r)[d]);
  return x;
}

/// A rank's columns of the logits, as rows of the weight. Padding is NaN.
inline Matrix weight_of(const Problem& p, const VocabPartition& vocab, int rank) {
  Matrix weight(vocab.columns(rank), p.hidden, p.type);
  for (int64_t c = 0; c < vocab.valid(rank); ++c)
    for (int64_t d = 0; d < p.hidden; ++d) weight.set(c, d, p.weight.row(vocab.begin(rank) + c)[d]);
  return weight;
}

inline LinearOptions options_of(const Problem& p, bool sharded = true) {
  LinearOptions options;
  options.tokens = p.tokens;
  options.hidden = p.hidden;
  options.sharded = sharded;
  options.temperature = p.temperature;
  options.temperatures = p.temperatures;
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
      const int64_t i = at;
      worst = worse(worst, std::abs(got.at(r, d) - want[i][d]) /
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

/// The layer under test. `run` returns its results on this rank for X and W in these types.
struct Layer {
  std::function<Result(const Problem&, const LinearOptions&, const VocabPartition&, DType x,
                       DType weight)>
      run;
  bool rounds_to_bf16 = false;  ///< the logits' gradients, where X and W are bf16

  Result operator()(const Problem& p, const LinearOptions& o, const VocabPartition& vocab) const {
    return run(p, o, vocab, p.type, p.type);
  }
  void expect_reference(const Problem& p, const LinearOptions& options, const VocabPartition& vocab,
                        DType x, DType weight) const {
    const int rank = world().rank();
    SCOPED_TRACE(testing::Message()
                 << p.tokens << " x " << p.hidden << " x " << p.vocab_size << ' ' << name_of(x)
                 << ' ' << name_of(weight) << (options.sharded ? " sharded" : "")
                 << (options.entropy ? " entropy" : "") << " tiles " << options.tile_rows << " x "
                 << options.tile_columns << " columns " << vocab.columns(rank));
    const bool rounded = rounds_to_bf16 && x == DType::bf16 && weight == DType::bf16;
    expect_result(p, make_reference(p, options.entropy), run(p, options, vocab, x, weight),
                  first_row_of(world(), p.tokens, options.sharded), vocab, rank,
                  rounded ? logit_gradient_tolerance(DType::bf16) : 0);
  }
  void expect_reference(const Problem& p, const LinearOptions& options,
                        const VocabPartition& vocab) const {
    expect_reference(p, options, vocab, p.type, p.type);
  }
  void expect_few_tokens_and_empty_shards() const {
    for (const int64_t tokens : {0, 1, 2, 5})
      for (const bool sharded : {true, false}) {
        const Problem p = make_problem(tokens, 7, 20, DType::f32);
        LinearOptions options = options_of(p, sharded);
        options.entropy = true;
        expect_reference(p, options, balanced_partition(p.vocab_size, world().size()));
      }
    const Problem p = make_problem(9, 5, 2, DType::f32);
    expect_reference(p, options_of(p), balanced_partition(2, world().size()));
    expect_reference(p, options_of(p), even_partition(2, 3 * world().size(), world().size()));
  }
  /// On all ranks, and for every number of threads.
  void expect_same_bits(const Problem& p, int64_t tile_rows, int64_t tile_columns,
                        const std::vector<int>& threads) const {
    const VocabPartition vocab = partitions(p.vocab_size, world().size())[2];
    LinearOptions options = options_of(p, false);
    options.entropy = true;
    options.tile_rows = tile_rows;
    options.tile_columns = tile_columns;
    const Result first = (*this)(p, options, vocab);
    for (const Floats& x : {first.logprob, first.entropy, elements(first.d_x.ref())})
      expect_same_on_all_ranks(x);
    for (const int t : threads) {
      options.threads = t;
      const Result again = (*this)(p, options, vocab);
      EXPECT_EQ(digest<float>(again.logprob), digest<float>(first.logprob)) << t << " threads";
      EXPECT_EQ(digest<float>(again.entropy), digest<float>(first.entropy)) << t << " threads";
      EXPECT_EQ(elements(again.d_x.ref()), elements(first.d_x.ref())) << t << " threads";
      EXPECT_EQ(elements(again.d_weight.ref()), elements(first.d_weight.ref())) << t << " threads";
    }
  }
  /// Two of three tokens hold NaN and have no gradient.
  void expect_no_part_of_tokens_without_gradient(int64_t tokens, int64_t tile_rows) const {
    Problem p = make_problem(tokens, 8, 30, DType::f32);
    const auto has_none = [](int64_t t) { return t % 3 != 1; };
    for (int64_t t = 0; t < tokens; ++t)
      if (has_none(t)) {
        p.d_logprob[t] = p.d_entropy[t] = 0;
        p.targets[t] = -1;
      }
    LinearOptions options = options_of(p);
    options.entropy = true;
    const Reference want = make_reference(p, true);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < 8 && has_none(t); ++i) p.x.at(t, i) = quiet_nan;
    const VocabPartition vocab = partitions(30, world().size())[2];
    for (const int64_t rows : {int64_t{0}, tile_rows}) {
      options.tile_rows = rows;
      Result got = (*this)(p, options, vocab);
      for (int64_t t = 0; t < tokens; ++t)
        if (has_none(t)) {
          EXPECT_EQ(got.logprob[t], 0);  // no target
          EXPECT_TRUE(std::isnan(got.entropy[t]));
          got.entropy[t] = static_cast<float>(want.entropy[t]);
        }
      expect_result(p, want, got, first_row_of(world(), tokens, true), vocab, world().rank());
    }
  }
};

}  // namespace gyre::test::linear
