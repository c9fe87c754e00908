// Log-probabilities and entropies from a vocabulary split over all ranks, and their gradients,
// against whole rows in double precision.

#include "logprobs/vocab_parallel.hpp"

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <numeric>

#include "errors.hpp"
#include "logprobs/reference.hpp"
#include "score_checks.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::differs;
using test::LogitRows;
using test::Matrix;
using test::on_last_rank;
using test::world;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

struct Gradients {
  Floats logprob, entropy;  // [tokens, K], [tokens] or empty
};

struct Scores {
  Floats logprob, entropy, d_logits;
};

/// One forward and backward pass of this rank's shard. The gradients have the logits' type.
Scores score(const LogitRows& rows, const VocabPartition& vocab, DType type,
             const ScoreOptions& options, const Ints& ids, const Gradients& g,
             Communicator& tp = world()) {
  const Matrix logits = rows.shard(vocab, tp.rank(), type);
  VocabScores scores(rows.tokens, vocab, options, tp);
  Scores out;
  out.logprob.assign(ids.size(), NAN);
  out.entropy.assign(options.entropy ? static_cast<size_t>(rows.tokens) : 0, NAN);
  HostStream stream;
  scores.forward(logits.ref(), ids, stream, out.logprob, out.entropy);
  Matrix d_logits(rows.tokens, logits.cols(), type);
  scores.backward(logits.ref(), ids, g.logprob, g.entropy, d_logits.ref());
  out.d_logits = test::elements(d_logits.ref());
  return out;
}

/// What gradients of a row are made of, column by column; see logit_gradient_scale.
std::vector<double> gradient_scales(std::span<const double> row, std::span<const int32_t> ids,
                                    std::span<const double> g, double h, double temperature) {
  const std::vector<double> logprobs = log_softmax_reference(row, temperature);
  const double sum = std::accumulate(g.begin(), g.end(), 0.0);
  const double entropy = h == 0 ? 0 : score_row_reference(row, -1, temperature).entropy;
  std::vector<double> weights(row.size(), 0);
  for (size_t k = 0; k < ids.size(); ++k)
    if (ids[k] >= 0 && ids[k] < std::ssize(row))
      weights[static_cast<size_t>(ids[k])] += std::abs(g[k]) / temperature;
  std::vector<double> scales;
  for (size_t v = 0; v < row.size(); ++v)
    scales.push_back(logit_gradient_scale(logprobs[v], (sum + h * entropy) / temperature,
                                          h / temperature, weights[v]));
  return scales;
}

/// A row that is no distribution: NaN, where a logit is not -inf.
void expect_no_gradient(const Floats& got, int64_t token, const VocabPartition& vocab, int rank,
                        std::span<const double> row) {
  const auto mine = test::row_of(got, token, vocab.columns(rank));
  for (size_t c = 0; c < mine.size(); ++c) {
    const size_t id = static_cast<size_t>(vocab.begin(rank)) + c;
    if (id < row.size() && row[id] == -inf) continue;
    const bool expected = id < row.size() ? std::isnan(mine[c]) : mine[c] == 0;
    EXPECT_TRUE(expected) << "token " << token << ", id " << id << ": " << mine[c];
  }
}

/// Values and gradients against the references.
void expect_reference(const LogitRows& rows, const VocabPartition& vocab, DType type,
                      const ScoreOptions& options, const Ints& ids, const Gradients& g,
                      const Scores& got, int rank) {
  const int64_t token_ids = options.token_ids;
  for (int64_t t = 0; t < rows.tokens; ++t) {
    const auto row = rows.row(t);
    const auto row_ids = test::row_of(ids, t, token_ids);
    for (int64_t k = 0; k < token_ids; ++k) {
      const auto at = static_cast<size_t>(t * token_ids + k);
      test::expect_logprob(got.logprob[at],
                           score_row_reference(row, ids[at], options.temperature).logprob,
                           fmt::format("log p of token {}, id {}", t, ids[at]));
    }
    const double entropy = score_row_reference(row, -1, options.temperature).entropy;
    if (options.entropy)
      test::expect_entropy(got.entropy[static_cast<size_t>(t)], entropy, rows.vocab_size,
                           fmt::format("entropy of token {}", t));
    if (std::isnan(entropy)) {
      expect_no_gradient(got.d_logits, t, vocab, rank, row);
      continue;
    }
    const std::vector<double> g_row = test::doubles(test::row_of(g.logprob, t, token_ids));
    const double h = g.entropy.empty() ? 0 : static_cast<double>(g.entropy[static_cast<size_t>(t)]);
    const auto want = score_gradient_reference(row, row_ids, g_row, h, options.temperature);
    const auto scale = gradient_scales(row, row_ids, g_row, h, options.temperature);
    test::expect_gradient_row(got.d_logits, type, t, vocab, rank, want, scale);
  }
}

struct Case {
  const char* name;
  int64_t tokens, vocab_size, token_ids;
  bool entropy;
  double temperature, size;
};

/// The shapes that the same functions are tested with in NeMo RL, and what those leave out.
const Case cases[] = {
    {"log-probabilities of 1024 ids", 32, 1024, 1, false, 1, 1},
    {"logits times 100", 6, 64, 1, true, 1, 100},
    {"three ids and entropies", 32, 256, 3, true, 1, 1},
    {"eight ids, temperature 1.5", 8, 8, 1, true, 1.5, 1},
    {"64 of 37 ids, cold", 24, 37, 64, true, 0.3, 2},
    {"entropies alone", 16, 100, 0, true, 1, 2},
    {"long rows", 8, 5000, 2, true, 1, 2},
};

TEST(VocabParallel, RandomRowsEqualTheReferenceForAnyPartition) {
  for (const Case& c : cases)
    for (const DType type : {DType::f32, DType::bf16}) {
      const LogitRows rows = test::random_logits(c.tokens, c.vocab_size, type, c.size);
      const ScoreOptions options{c.token_ids, c.entropy, c.temperature, 1};
      const Ints ids = test::mixed_ids(c.tokens, c.token_ids, c.vocab_size);
      const Gradients g{test::gradients(c.tokens, c.token_ids),
                        test::gradients(c.entropy ? c.tokens : 0, 1, 2)};
      for (const VocabPartition& vocab : test::partitions(c.vocab_size, world().size())) {
        SCOPED_TRACE(fmt::format("{} of {}, offsets {}", c.name, name_of(type),
                                 fmt::join(vocab.offsets, " ")));
        const Scores got = score(rows, vocab, type, options, ids, g);
        expect_reference(rows, vocab, type, options, ids, g, got, world().rank());
        test::expect_same_on_all_ranks(got.logprob);
        test::expect_same_on_all_ranks(got.entropy);
      }
    }
}

TEST(VocabParallel, GoldenLogprobsAndEntropies) {
  const LogitRows rows = test::golden_logits();
  const Ints targets = test::golden_targets();
  const double logprob[] = {-3.123163688,  -7.825016135, -12.917737857, -5.658393937,
                            -10.587148456, -5.776064173, -10.784641104, -3.470435309};
  const double entropy[] = {2.643832576, 2.637051615, 2.653252468, 2.676617565,
                            2.655697487, 2.672440759, 2.723055265, 2.654009122};
  const double log_sum_exp[] = {7.748163688, 7.575016135, 7.792737857, 7.783393937,
                                7.837148456, 7.651064173, 7.784641104, 7.720435309};
  for (const DType type : {DType::f32, DType::bf16})
    for (const VocabPartition& vocab : test::partitions(64, world().size())) {
      const Matrix logits = rows.shard(vocab, world().rank(), type);
      VocabScores scores(16, vocab, {.token_ids = 1, .entropy = true}, world());
      Floats p(16), h(16);
      HostStream stream;
      scores.forward(logits.ref(), targets, stream, p, h);
      for (size_t s = 0; s < 8; ++s) {
        test::expect_logprob(p[s], logprob[s], "golden log p");
        test::expect_entropy(h[s], entropy[s], 64, "golden entropy");
        const RowNormalizer n = scores.normalizers()[s];
        test::expect_logprob(n.max + n.log_sum, log_sum_exp[s], "golden log-sum-exp");
      }
      const auto sum = [](const Floats& x) { return std::accumulate(x.begin(), x.end(), 0.0); };
      test::expect_near(sum(p), -127.545396938, logprob_tolerance() * 127, "sum of log p");
      test::expect_near(sum(h), 42.577899221, logprob_tolerance() * 42, "sum of entropies");
    }
}

/// The gradient of one row, gathered from all ranks into whole rows.
std::vector<double> whole_gradient(const LogitRows& rows, DType type, const ScoreOptions& options,
                                   const Ints& ids, const Gradients& g) {
  const VocabPartition vocab = test::partitions(rows.vocab_size, world().size()).back();
  const Scores got = score(rows, vocab, type, options, ids, g);
  std::vector<double> whole;
  for (int r = 0; r < world().size(); ++r)
    for (int64_t c = 0; c < vocab.columns(r); ++c) {
      const bool mine = r == world().rank();
      const double value = mine ? static_cast<double>(got.d_logits[static_cast<size_t>(c)]) : 0;
      whole.push_back(all_reduce_value(world(), value, ReduceOp::sum));
    }
  return whole;
}

TEST(VocabParallel, GoldenGradients) {
  LogitRows row(1, 64);
  const LogitRows golden = test::golden_logits();
  std::copy_n(golden.values.begin(), 64, row.values.begin());
  const auto of_target = whole_gradient(row, DType::f32, {.token_ids = 1}, {5}, {{1}, {}});
  const double tolerance = logit_gradient_tolerance(DType::f32) + 5e-10;  // nine decimals
  const double first[] = {-1.070e-6, -8.956e-6, -7.4989e-5, -6.27879e-4, -5.257163e-3};
  for (size_t v = 0; v < 5; ++v) test::expect_near(of_target[v], first[v], tolerance, "first ids");
  test::expect_near(of_target[5], 0.955982310, tolerance, "the target");
  test::expect_near(of_target[57], -0.174093340, tolerance, "the most likely id");
  double sum = 0, norm = 0;
  for (const double x : of_target) sum += x, norm += std::abs(x);
  test::expect_near(norm, 1.911964621, 2 * tolerance, "L1 norm");
  test::expect_near(sum, 0, 2 * tolerance, "sum");

  const auto of_entropy =
      whole_gradient(row, DType::f32, {.token_ids = 0, .entropy = true}, {}, {{}, {1}});
  EXPECT_EQ(std::min_element(of_entropy.begin(), of_entropy.end()) - of_entropy.begin(), 57);
  EXPECT_EQ(std::max_element(of_entropy.begin(), of_entropy.end()) - of_entropy.begin(), 39);
  test::expect_near(of_entropy[57], -0.155929988, tolerance, "entropy's least");
  test::expect_near(of_entropy[39], 0.026146259, tolerance, "entropy's largest");
}

/// The row 0 1 2 3 4.
LogitRows ramp() {
  LogitRows row(1, 5);
  std::iota(row.values.begin(), row.values.end(), 0);
  return row;
}

TEST(VocabParallel, GoldenGradientsOfARamp) {
  const double tolerance = 8 * logit_gradient_tolerance(DType::f32);  // gradients up to 8
  const auto expect = [&](const std::vector<double>& got, const std::vector<double>& want) {
    for (size_t v = 0; v < 5; ++v) test::expect_near(got[v], want[v], tolerance, "the ramp");
  };
  expect(whole_gradient(ramp(), DType::f32, {.token_ids = 0, .entropy = true}, {}, {{}, {-1}}),
         {-0.040236628, -0.077689574, -0.125053614, -0.105809309, 0.348789125});
  // An id that nobody owns scores 0, but its gradient counts; equal ids add up.
  expect(whole_gradient(ramp(), DType::f32, {.token_ids = 1}, {9}, {{2}, {}}),
         {-0.023312462, -0.063369842, -0.172257089, -0.468243315, -1.272817293});
  expect(whole_gradient(ramp(), DType::f32, {.token_ids = 3}, {4, 4, 7}, {{1, 2, 5}, {}}),
         {-0.093249848, -0.253479366, -0.689028355, -1.872973258, -2.091269172});
}

/// Rows that break careless softmaxes, whole and in any one shard.
LogitRows special_rows(DType type) {
  constexpr int64_t vocab_size = 24;
  LogitRows rows = test::random_logits(14, vocab_size, type, 3);
  const auto fill = [&](int64_t t, int64_t begin, int64_t end, double z) {
    for (int64_t v = begin; v < end; ++v) rows.at(t, v) = z;
  };
  // A large common offset, in steps that the type still holds.
  const double offset = type == DType::f32 ? 1e4 : 512, step = type == DType::f32 ? 0.25 : 4;
  for (int64_t v = 0; v < vocab_size; ++v) {
    rows.at(0, v) = offset + step * static_cast<double>(v % 5);
    rows.at(1, v) = -rows.at(0, v);
    rows.at(2, v) = 128 * static_cast<double>(v % 7) - 512;  // far apart
  }
  fill(3, 0, vocab_size, 0);  // uniform
  rows.at(4, 0) = rows.at(4, vocab_size - 1) = -inf;
  fill(5, 0, vocab_size / 2, -inf);
  fill(6, vocab_size / 2, vocab_size, -inf);
  fill(7, 0, vocab_size, -inf);
  rows.at(7, 13) = 2;  // one id only
  fill(8, 0, vocab_size, -inf);
  rows.at(9, 1) = nan;
  rows.at(10, vocab_size - 1) = nan;
  fill(11, 0, vocab_size - 1, -inf);
  rows.at(11, vocab_size - 1) = nan;  // nothing but it in its shard
  rows.at(12, 7) = inf;
  rows.at(13, 0) = rows.at(13, vocab_size - 1) = inf;
  return rows;
}

TEST(VocabParallel, SpecialLogitsHaveTheValuesOfTheReference) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const LogitRows rows = special_rows(type);
    const ScoreOptions options{3, true, 1, 1};
    Ints ids;
    for (int32_t t = 0; t < 14; ++t) ids.insert(ids.end(), {0, (5 * t + 3) % 24, 23});
    const Gradients g{Floats(42, 0.5F), Floats(14, -2.0F)};
    for (const VocabPartition& vocab : test::partitions(24, world().size())) {
      SCOPED_TRACE(fmt::format("{}, offsets {}", name_of(type), fmt::join(vocab.offsets, " ")));
      const Scores got = score(rows, vocab, type, options, ids, g);
      expect_reference(rows, vocab, type, options, ids, g, got, world().rank());
      for (size_t t = 8; t < 14; ++t) {
        EXPECT_TRUE(std::isnan(got.logprob[3 * t])) << "row " << t;
        EXPECT_TRUE(std::isnan(got.logprob[3 * t + 2])) << "row " << t;
        EXPECT_TRUE(std::isnan(got.entropy[t])) << "row " << t;
      }
    }
  }
}

TEST(VocabParallel, SmallRowsByHand) {
  const auto one = [&](std::vector<double> row, int32_t id) {
    LogitRows rows(1, std::ssize(row));
    rows.values = std::move(row);
    const VocabPartition vocab = test::partitions(rows.vocab_size, world().size()).front();
    const Scores got =
        score(rows, vocab, DType::f32, {.token_ids = 1, .entropy = true}, {id}, {{1}, {0}});
    return std::pair(got.logprob[0], got.entropy[0]);
  };
  test::expect_logprob(one({0, 1, -inf}, 0).first, -1.313261688, "0 of 0 1 -inf");
  test::expect_logprob(one({0, 1, -inf}, 1).first, -0.313261688, "1 of 0 1 -inf");
  EXPECT_EQ(one({0, 1, -inf}, 2).first, -INFINITY);
  test::expect_entropy(one({0, 1, -inf}, 2).second, 0.582203109, 3, "entropy of 0 1 -inf");
  test::expect_logprob(one({1e4, 1e4, 0}, 0).first, -0.693147181, "0 of 1e4 1e4 0");
  test::expect_logprob(one({1e4, 1e4, 0}, 2).first, -10000.693147, "2 of 1e4 1e4 0");
  const std::vector<double> uniform(64, 1.5);
  test::expect_logprob(one(uniform, 40).first, -4.158883083, "uniform");
  test::expect_entropy(one(uniform, 40).second, 4.158883083, 64, "entropy of a uniform row");
  test::expect_logprob(one({1, 2, 3, 4}, 2).first, -1.440189699, "2 of 1 2 3 4");
}

TEST(VocabParallel, RowsWithoutAGradientGetZerosWhateverTheyHold) {
  const LogitRows rows = special_rows(DType::f32);
  const Ints ids(14, 7);
  for (const VocabPartition& vocab : test::partitions(24, world().size())) {
    const Scores got = score(rows, vocab, DType::f32, {.token_ids = 1, .entropy = true}, ids,
                             {Floats(14, 0), Floats(14, 0)});
    EXPECT_EQ(got.d_logits, Floats(got.d_logits.size(), 0.0F));
  }
}

TEST(VocabParallel, GradientsInThePlaceOfTheLogitsAndOfAnotherType) {
  const LogitRows rows = test::random_logits(9, 77, DType::bf16);
  const Ints ids = test::mixed_ids(9, 2, 77);
  const Gradients g{test::gradients(9, 2), test::gradients(9, 1, 2)};
  const ScoreOptions options{2, true, 0.8, 1};
  const VocabPartition vocab = test::partitions(77, world().size()).front();
  VocabScores scores(9, vocab, options, world());
  HostStream stream;
  for (const DType type : {DType::f32, DType::bf16}) {
    Matrix logits = rows.shard(vocab, world().rank(), type);
    Scores got{Floats(18), Floats(9), {}};
    scores.forward(logits.ref(), ids, stream, got.logprob, got.entropy);
    const DType other = type == DType::f32 ? DType::bf16 : DType::f32;
    Matrix d_logits(9, logits.cols(), other);
    scores.backward(logits.ref(), ids, g.logprob, g.entropy, d_logits.ref());
    got.d_logits = test::elements(d_logits.ref());
    expect_reference(rows, vocab, other, options, ids, g, got, world().rank());
    scores.backward(logits.ref(), ids, g.logprob, g.entropy, logits.ref());
    got.d_logits = test::elements(logits.ref());
    expect_reference(rows, vocab, type, options, ids, g, got, world().rank());
  }
}

TEST(VocabParallel, LogSoftmaxOfAllColumns) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const double temperature : {1.0, 1.5})
      for (const VocabPartition& vocab : test::partitions(256, world().size())) {
        const LogitRows rows = test::random_logits(15, 256, type);
        const Matrix logits = rows.shard(vocab, world().rank(), type);
        VocabScores scores(15, vocab, {.token_ids = 0, .temperature = temperature}, world());
        HostStream stream;
        scores.forward(logits.ref(), {}, stream, {}, {});
        Matrix log_p(15, logits.cols(), DType::f32), p(15, logits.cols(), DType::f32);
        scores.write_log_softmax(logits.ref(), false, log_p.ref());
        scores.write_log_softmax(logits.ref(), true, p.ref());
        for (int64_t t = 0; t < 15; ++t) {
          const auto want = log_softmax_reference(rows.row(t), temperature);
          for (int64_t c = 0; c < logits.cols(); ++c) {
            const int64_t id = vocab.begin(world().rank()) + c;
            const double x = id < 256 ? want[static_cast<size_t>(id)] : -inf;
            test::expect_logprob(log_p.ref().at(t, c), x, fmt::format("log p of {}", id));
            test::expect_near(p.at(t, c), std::exp(x),
                              logprob_tolerance() * logprob_scale(x) * std::exp(x),
                              fmt::format("p of {}", id));
          }
        }
      }
}

TEST(VocabParallel, GradientOfLogSoftmax) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const double temperature : {1.0, 1.5})
      for (const VocabPartition& vocab : test::partitions(253, world().size())) {
        const int rank = world().rank();
        LogitRows rows = test::random_logits(12, 253, type);
        const LogitRows g = test::random_logits(12, 253, type, 1, 3, TokenTensor::d_logprobs);
        for (int64_t v = 0; v < 126; ++v) rows.at(5, v) = -inf;
        Matrix logits = rows.shard(vocab, rank, type);
        const Matrix above = g.shard(vocab, rank, type);
        VocabScores scores(12, vocab, {.token_ids = 0, .temperature = temperature}, world());
        HostStream stream;
        scores.forward(std::as_const(logits).ref(), {}, stream, {}, {});
        const test::TrafficSince sent(world());
        scores.log_softmax_backward(std::as_const(logits).ref(), above.ref(), stream, logits.ref());
        EXPECT_EQ(sent.bytes(), 12 * 8 * (world().size() - 1));
        for (int64_t t = 0; t < 12; ++t) {
          const auto want = log_softmax_gradient_reference(rows.row(t), g.row(t), temperature);
          const auto logprob = log_softmax_reference(rows.row(t), temperature);
          double sizes = 0;
          for (const double x : g.row(t)) sizes += std::abs(x / temperature);
          for (int64_t c = 0; c < logits.cols(); ++c) {
            const int64_t id = vocab.begin(rank) + c;
            const auto v = static_cast<size_t>(id);
            const std::string where = fmt::format("token {}, id {}", t, id);
            if (id >= 253)
              EXPECT_EQ(logits.at(t, c), 0) << where;
            else
              test::expect_near(logits.at(t, c), want[v],
                                logit_gradient_tolerance(type) *
                                    logit_gradient_scale(logprob[v], sizes, 0,
                                                         std::abs(g.row(t)[v]) / temperature),
                                where);
          }
        }
      }
}

TEST(VocabParallel, OneCollectiveForwardAndNoneBackward) {
  const int n = world().size();
  for (const int64_t token_ids : {0, 1, 3})
    for (const bool entropy : {false, true}) {
      const LogitRows rows = test::random_logits(10, 50, DType::f32);
      const VocabPartition vocab = balanced_partition(50, n);
      const Matrix logits = rows.shard(vocab, world().rank(), DType::f32);
      VocabScores scores(10, vocab, {.token_ids = token_ids, .entropy = entropy}, world());
      const auto size = static_cast<size_t>(10 * token_ids);
      const Ints ids(size, 2);
      Floats logprob(size), h(entropy ? 10 : 0);
      HostStream stream;
      const test::TrafficSince forward(world());
      scores.forward(logits.ref(), ids, stream, logprob, h);
      EXPECT_EQ(forward.messages(), n > 1 ? 1 : 0);
      EXPECT_EQ(forward.bytes(), (n - 1) * 10 * 4 * (2 + token_ids + (entropy ? 1 : 0)));
      Matrix d_logits(10, logits.cols(), DType::f32);
      const test::TrafficSince backward(world());
      scores.backward(logits.ref(), ids, logprob, h, d_logits.ref());
      EXPECT_EQ(backward.messages(), 0);
      EXPECT_EQ(backward.bytes(), 0);
    }
}

TEST(VocabParallel, NoMemoryOfTheSizeOfTheLogits) {
  const int64_t tokens = 512, columns = 1024;
  const VocabPartition vocab =
      even_partition(columns * world().size(), columns * world().size(), world().size());
  Matrix logits(tokens, columns, DType::bf16);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < columns; ++c) logits.set(t, c, static_cast<double>((t + 7 * c) % 13));
  const Ints ids(static_cast<size_t>(tokens), 3);
  Floats logprob(ids.size()), entropy(ids.size());
  HostStream stream;
  reset_memory_peak();
  const int64_t before = memory_use().peak_bytes;
  VocabScores scores(tokens, vocab, {.token_ids = 1, .entropy = true, .temperature = 2}, world());
  scores.forward(logits.ref(), ids, stream, logprob, entropy);
  scores.backward(logits.ref(), ids, logprob, entropy, logits.ref());
  const int64_t used = memory_use().peak_bytes - before;
  EXPECT_GE(used, tokens * 12);
  EXPECT_LT(used, tokens * columns / 2) << "half a byte an element";
}

TEST(VocabParallel, ResultsDoNotDependOnTheSizeOfTheGroup) {
  const LogitRows rows = test::random_logits(12, 203, DType::f32, 4);
  const Ints ids = test::mixed_ids(12, 3, 203);
  const Gradients g{test::gradients(12, 3), test::gradients(12, 1, 2)};
  const ScoreOptions options{3, true, 0.9, 1};
  for (const int ranks : {1, 2, world().size()}) {
    SCOPED_TRACE(fmt::format("groups of {}", ranks));
    const std::unique_ptr<Communicator> group = world().split(world().rank() / ranks);
    const VocabPartition vocab = balanced_partition(203, group->size());
    const Scores got = score(rows, vocab, DType::f32, options, ids, g, *group);
    expect_reference(rows, vocab, DType::f32, options, ids, g, got, group->rank());
  }
}

TEST(VocabParallel, TheSameBitsAgainAndForAnyNumberOfThreads) {
  const LogitRows rows = test::random_logits(300, 130, DType::bf16, 3);
  const Ints ids = test::mixed_ids(300, 2, 130);
  const Gradients g{test::gradients(300, 2), test::gradients(300, 1, 2)};
  const VocabPartition vocab = test::partitions(130, world().size()).back();
  const Scores once = score(rows, vocab, DType::bf16, {2, true, 1, 1}, ids, g);
  for (const int threads : {1, 3}) {
    const Scores again = score(rows, vocab, DType::bf16, {2, true, 1, threads}, ids, g);
    EXPECT_EQ(test::digest<float>(again.logprob), test::digest<float>(once.logprob));
    EXPECT_EQ(test::digest<float>(again.entropy), test::digest<float>(once.entropy));
    EXPECT_EQ(test::digest<float>(again.d_logits), test::digest<float>(once.d_logits));
  }
}

TEST(VocabParallel, AnotherNumberOfRowsNeedsNoCommunication) {
  const VocabPartition vocab = balanced_partition(40, world().size());
  VocabScores scores(0, vocab, {.token_ids = 1}, world());
  HostStream stream;
  for (const int64_t tokens : {5, 0, 9, 9}) {
    const test::TrafficSince resizing(world());
    scores.resize(tokens);
    EXPECT_EQ(resizing.messages(), 0);
    const LogitRows rows = test::random_logits(tokens, 40, DType::f32);
    const Matrix logits = rows.shard(vocab, world().rank(), DType::f32);
    const Ints ids = test::mixed_ids(tokens, 1, 40);
    Floats got(ids.size());
    scores.forward(logits.ref(), ids, stream, got, {});
    for (int64_t t = 0; t < tokens; ++t) {
      const auto at = static_cast<size_t>(t);
      test::expect_logprob(got[at], score_row_reference(rows.row(t), ids[at]).logprob,
                           fmt::format("log p of token {}", t));
    }
  }
}

std::string error_of(int64_t tokens, const VocabPartition& vocab, const ScoreOptions& options) {
  return agreed_message([&] { VocabScores(tokens, vocab, options, world()); });
}

TEST(VocabParallel, ArgumentsThatDifferEndAllRanksAlike) {
  const int n = world().size();
  const VocabPartition vocab = even_partition(16 * n - 1, 16 * n, n);
  const bool last = on_last_rank();
  const std::string what = "log-probabilities";
  EXPECT_EQ(error_of(4, vocab, {}), "no error");
  EXPECT_EQ(error_of(last ? 5 : 4, vocab, {}), differs(what, "the number of tokens", "4", "5"));
  EXPECT_EQ(error_of(4, vocab, {.token_ids = last ? 2 : 1}),
            differs(what, "the number of ids a token", "1", "2"));
  EXPECT_EQ(error_of(4, vocab, {.entropy = last}),
            differs(what, "whether entropies are wanted", "0", "1"));
  EXPECT_EQ(error_of(4, vocab, {.temperature = last ? 0.7 : 1}),
            differs(what, "the temperature", "1", "0.7"));
  VocabPartition other = vocab;
  other.vocab_size -= last ? 1 : 0;
  EXPECT_EQ(error_of(4, other, {}),
            differs(what, "the number of ids of the vocabulary", std::to_string(16 * n - 1),
                    std::to_string(16 * n - 2)));
  other = vocab;
  other.offsets.back() += last ? 3 : 0;
  EXPECT_EQ(error_of(4, other, {}), differs(what, "the number of columns of the vocabulary",
                                            std::to_string(16 * n), std::to_string(16 * n + 3)));
  if (n < 2) return;
  other = vocab;
  other.offsets[1] += last ? 2 : 0;
  EXPECT_EQ(error_of(4, other, {}),
            differs(what, "the first column of shard 1 of the vocabulary", "16", "18"));
}

TEST(VocabParallel, ArgumentsOutOfRangeEndAllRanksAlike) {
  const int n = world().size();
  const VocabPartition vocab = balanced_partition(20, n);
  EXPECT_EQ(error_of(-1, vocab, {}), "-1 tokens; the fewest are 0");
  EXPECT_EQ(error_of(4, vocab, {.token_ids = -2}), "-2 ids a token; the fewest are 0");
  for (const auto& [temperature, text] : {std::pair(0.0, "0"),
                                          {-1.0, "-1"},
                                          {inf, "inf"},
                                          {nan, "nan"},
                                          {1e-39, "1e-39"},
                                          {1e39, "1e+39"}})
    EXPECT_EQ(error_of(4, vocab, {.temperature = temperature}),
              fmt::format("a temperature of {}; it must be positive and finite, and so its inverse "
                          "in f32",
                          text));
  EXPECT_EQ(error_of(4, balanced_partition(20, n + 1), {}),
            fmt::format("a vocabulary in {} shards for a group of {} ranks; it must be one shard a "
                        "rank",
                        n + 1, n));
  VocabPartition moved = vocab;
  moved.offsets[0] = on_last_rank() ? 1 : 0;
  EXPECT_EQ(
      error_of(4, moved, {}),
      "the first shard of the vocabulary begins at column 1; it must be 0" + test::found_on(n - 1));
}

}  // namespace GYRE_FILE
}  // namespace gyre
