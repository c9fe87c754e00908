// What holds between the ways of computing log-probabilities: slices of rows and the whole, ours
// and those of NeMo RL, filtered and plain, some ids and all, one type of logits and the other.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "baselines/upstream.hpp"
#include "logprobs/distillation.hpp"
#include "logprobs/filtered_scores.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "score_checks.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::LogitRows;
using test::Matrix;
using test::world;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;

constexpr double inf = std::numeric_limits<double>::infinity();

MatrixRef rows_of(MatrixRef m, int64_t begin, int64_t count) {
  m.data += begin * m.stride * static_cast<int64_t>(size_of(m.type));
  m.rows = count;
  return m;
}
template <class T>
std::span<T> part_of(std::vector<T>& values, int64_t begin, int64_t count, int64_t row = 1) {
  return std::span<T>(values).subspan(static_cast<size_t>(begin * row),
                                      static_cast<size_t>(count * row));
}

/// What one rank has of one pass and back.
struct Result {
  Floats logprob, entropy, d_logits;
  friend bool operator==(const Result&, const Result&) = default;
};

constexpr int64_t token_ids = 2;

/// Scores of slices of `chunk` rows, one after the other, by one object; gradients in place.
Result score_slices(const LogitRows& rows, const VocabPartition& vocab, DType type, int64_t chunk) {
  const int64_t tokens = rows.tokens;
  Ints ids = test::mixed_ids(tokens, token_ids, rows.vocab_size);
  Floats g = test::gradients(tokens, token_ids), g_h = test::gradients(tokens, 1, 2);
  Matrix logits = rows.shard(vocab, world().rank(), type);
  Result result{Floats(ids.size()), Floats(g_h.size()), {}};
  VocabScores scores(0, vocab, {.token_ids = token_ids, .entropy = true, .temperature = 0.75},
                     world());
  HostStream stream;
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t count = std::min(chunk, tokens - begin);
    const MatrixRef slice = rows_of(logits.ref(), begin, count);
    scores.resize(count);
    scores.forward(slice, part_of(ids, begin, count, token_ids), stream,
                   part_of(result.logprob, begin, count, token_ids),
                   part_of(result.entropy, begin, count));
    scores.backward(slice, part_of(ids, begin, count, token_ids),
                    part_of(g, begin, count, token_ids), part_of(g_h, begin, count), slice);
  }
  result.d_logits = test::elements(logits.ref());
  return result;
}

TEST(LogprobProperties, SlicesOfAnyLengthByOneObjectHaveTheBitsOfTheWhole) {
  for (const auto& [vocab_size, type] :
       {std::pair<int64_t, DType>{11, DType::f32}, {13, DType::bf16}, {200, DType::f32}}) {
    const LogitRows rows = test::random_logits(2 * 5, vocab_size, type);
    for (const VocabPartition& vocab : test::partitions(vocab_size, world().size())) {
      const Result whole = score_slices(rows, vocab, type, 10);
      for (int64_t t = 0; t < 10; ++t)
        test::expect_entropy(whole.entropy[static_cast<size_t>(t)],
                             score_row_reference(rows.row(t), 0, 0.75).entropy, vocab_size,
                             fmt::format("entropy of row {}", t));
      // The last slice is shorter; the first is longer than all rows.
      for (const int64_t chunk : {16, 1, 2, 3})
        EXPECT_EQ(score_slices(rows, vocab, type, chunk), whole) << "slices of " << chunk;
    }
  }
}

Result filter_slices(const LogitRows& rows, const Ints& all_targets, const VocabPartition& vocab,
                     const SamplingFilter& filter, int64_t chunk) {
  Ints targets = all_targets;
  Floats g = test::gradients(rows.tokens, 1);
  Matrix logits = rows.shard(vocab, world().rank(), DType::f32);
  Result result{Floats(targets.size()), {}, {}};
  HostStream stream;
  for (int64_t begin = 0; begin < rows.tokens; begin += chunk) {
    const int64_t count = std::min(chunk, rows.tokens - begin);
    const MatrixRef slice = rows_of(logits.ref(), begin, count);
    FilteredScores scores(count, vocab, DType::f32, {filter, 2, 1}, world());
    scores.forward(slice, part_of(targets, begin, count), stream,
                   part_of(result.logprob, begin, count));
    scores.backward(slice, part_of(targets, begin, count), part_of(g, begin, count), slice);
  }
  result.d_logits = test::elements(logits.ref());
  return result;
}

Ints large_targets(const LogitRows& rows, int64_t most) {
  Ints targets;
  for (int64_t t = 0; t < rows.tokens; ++t)
    targets.push_back(top_k_reference(rows.row(t), t % most + 1).back().id);
  return targets;
}

TEST(LogprobProperties, SlicesUnderAFilterHaveTheBitsOfTheWhole) {
  const SamplingFilter filter{4, 0.75, 1};
  for (const int64_t vocab_size : {11, 13}) {
    const LogitRows rows = test::random_logits(2 * 5, vocab_size, DType::f32);
    const Ints targets = large_targets(rows, 5);
    const VocabPartition vocab = test::partitions(vocab_size, world().size()).back();
    const Result whole = filter_slices(rows, targets, vocab, filter, 10);
    for (int64_t t = 0; t < 10; ++t) {
      const auto at = static_cast<size_t>(t);
      test::expect_logprob(whole.logprob[at],
                           filtered_logprob_reference(rows.row(t), targets[at], filter),
                           fmt::format("log p of row {}", t));
    }
    for (const int64_t chunk : {1, 2, 16})
      EXPECT_EQ(filter_slices(rows, targets, vocab, filter, chunk), whole);
  }
}

TEST(LogprobProperties, OnePassEqualsTheSlicesAndTheWholeOfNeMoRl) {
  const int64_t tokens = 2 * 128, vocab_size = 2048;
  for (const DType type : {DType::f32, DType::bf16}) {
    const LogitRows rows = test::random_logits(tokens, vocab_size, type, 1);
    const VocabPartition vocab = even_partition(
        vocab_size, vocab_size + world().size() - vocab_size % world().size(), world().size());
    const Ints targets = test::mixed_ids(tokens, 1, vocab_size);
    const Floats g = test::gradients(tokens, 1);
    const Matrix logits = rows.shard(vocab, world().rank(), type);
    Matrix ours(tokens, logits.cols(), type);
    Floats logprob(targets.size());
    HostStream stream;
    VocabScores scores(tokens, vocab, {}, world());
    scores.forward(logits.ref(), targets, stream, logprob, {});
    scores.backward(logits.ref(), targets, g, {}, ours.ref());
    for (const int64_t chunk : {0, 32}) {
      Matrix theirs(tokens, logits.cols(), type);
      Floats other(targets.size());
      upstream::Logprob method({tokens, vocab, chunk, 1}, world());
      method.forward(logits.ref(), targets, stream, other);
      method.backward(logits.ref(), targets, g, stream, theirs.ref());
      for (int64_t t = 0; t < tokens; ++t) {
        const auto at = static_cast<size_t>(t);
        const auto y = static_cast<double>(other[at]), x = static_cast<double>(g[at]);
        // Both have their errors.
        test::expect_near(static_cast<double>(logprob[at]), y,
                          2 * logprob_tolerance() * logprob_scale(y), fmt::format("row {}", t));
        const double scale = logit_gradient_scale(0, x, 0, std::abs(x));
        for (int64_t c = 0; c < logits.cols(); ++c)
          test::expect_near(ours.at(t, c), theirs.at(t, c),
                            2 * logit_gradient_tolerance(type) * scale,
                            fmt::format("gradient of row {}, column {}", t, c));
      }
    }
  }
}

TEST(LogprobProperties, TheSoftmaxOfSomeIdsIsTheFullOneRenormalisedAtAnyTemperature) {
  for (const auto& [vocab_size, count] : {std::pair<int64_t, int64_t>{64, 8}, {32, 6}})
    for (const double temperature : {1.0, 2.0})
      for (const VocabPartition& vocab : test::partitions(vocab_size, world().size())) {
        LogitRows rows = test::random_logits(2 * 6, vocab_size, DType::f32);
        Ints ids;
        for (int64_t t = 0; t < rows.tokens; ++t)
          for (int64_t k = 0; k < count; ++k)
            ids.push_back(static_cast<int32_t>((5 * t + 7 * k) % vocab_size));
        Floats full(ids.size()), some(ids.size()), teacher(ids.size());
        HostStream stream;
        VocabScores scores(rows.tokens, vocab, {.token_ids = count, .temperature = temperature},
                           world());
        scores.forward(rows.shard(vocab, world().rank(), DType::f32).ref(), ids, stream, full, {});
        for (double& z : rows.values) z /= temperature;  // exact
        DistillationScores distillation(rows.tokens, vocab, {count, true, false, 1}, world());
        distillation.forward(rows.shard(vocab, world().rank(), DType::f32).ref(),
                             Floats(ids.size()), ids, stream, some, teacher, {});
        for (int64_t t = 0; t < rows.tokens; ++t) {
          double sum = 0;
          for (const float x : test::row_of(full, t, count)) sum += std::exp(double{x});
          for (int64_t k = 0; k < count; ++k) {
            const auto at = static_cast<size_t>(t * count + k);
            const double want = double{full[at]} - std::log(sum);
            test::expect_near(double{some[at]}, want,
                              2 * logprob_tolerance() * logprob_scale(double{full[at]}),
                              fmt::format("row {}, entry {}", t, k));
          }
        }
      }
}

TEST(LogprobProperties, LogitsAHundredTimesAsLargeAndAllTargetsTheFirstId) {
  LogitRows rows = test::random_logits(2 * 3, 64, DType::f32, 1);
  for (double& z : rows.values) z = static_cast<double>(static_cast<float>(100 * z));
  const Ints targets(6, 0);
  const Floats g(6, 1);
  for (const VocabPartition& vocab : test::partitions(64, world().size())) {
    const Matrix logits = rows.shard(vocab, world().rank(), DType::f32);
    Matrix d_logits(6, logits.cols(), DType::f32);
    Floats logprob(6);
    HostStream stream;
    VocabScores scores(6, vocab, {}, world());
    scores.forward(logits.ref(), targets, stream, logprob, {});
    scores.backward(logits.ref(), targets, g, {}, d_logits.ref());
    const Floats got = test::elements(d_logits.ref());
    for (int64_t t = 0; t < 6; ++t) {
      const auto row = rows.row(t);
      test::expect_logprob(logprob[static_cast<size_t>(t)], score_row_reference(row, 0).logprob,
                           fmt::format("row {}", t));
      EXPECT_TRUE(std::isfinite(logprob[static_cast<size_t>(t)]));
      const Doubles logprobs = log_softmax_reference(row);
      Doubles scales;
      for (size_t v = 0; v < row.size(); ++v)
        scales.push_back(logit_gradient_scale(logprobs[v], 1, 0, v == 0 ? 1 : 0) + 0x1p-80);
      const int32_t id = 0;
      const double one = 1;
      test::expect_gradient_row(got, DType::f32, t, vocab, world().rank(),
                                score_gradient_reference(row, {&id, 1}, {&one, 1}, 0), scales);
    }
  }
}

/// Log-probabilities and numbers of survivors under a filter.
struct Filtered {
  Floats logprob;
  Ints kept;
};

Filtered filter_rows(const LogitRows& rows, const Ints& targets, const VocabPartition& vocab,
                     DType type, const SamplingFilter& filter, bool train) {
  Matrix logits = rows.shard(vocab, world().rank(), type);
  FilteredScores scores(rows.tokens, vocab, type, {filter, 8, 1}, world());
  Filtered result{Floats(targets.size()), {}};
  HostStream stream;
  scores.forward(logits.ref(), targets, stream, result.logprob);
  if (train) {
    Matrix d_logits = logits;
    const test::TrafficSince before(world());
    scores.backward(logits.ref(), targets, test::gradients(rows.tokens, 1), d_logits.ref());
    EXPECT_EQ(before.messages(), 0) << "backward needs no communication";
    scores.forward(logits.ref(), targets, stream, result.logprob);
  }
  result.kept.assign(scores.survivors().begin(), scores.survivors().end());
  return result;
}

const std::vector<SamplingFilter> filters = {{10, 1, 1}, {0, 0.9, 1}, {10, 0.9, 1}, {0, 0.8, 1.25}};

TEST(LogprobProperties, UnderOneFilterTheRatioOfCurrentToPreviousProbabilitiesIsOne) {
  const LogitRows rows = test::random_logits(20, 300, DType::bf16);
  const Ints targets = large_targets(rows, 12);
  const VocabPartition vocab = test::partitions(300, world().size()).back();
  for (const SamplingFilter& filter : filters) {
    // Before training, without gradients, and the policy itself.
    const Filtered previous = filter_rows(rows, targets, vocab, DType::bf16, filter, false);
    const Filtered current = filter_rows(rows, targets, vocab, DType::bf16, filter, true);
    EXPECT_EQ(previous.logprob, current.logprob);
    EXPECT_EQ(previous.kept, current.kept);
    // The same values, widened before the filter.
    const Filtered wide = filter_rows(rows, targets, vocab, DType::f32, filter, true);
    EXPECT_EQ(wide.kept, current.kept);
    for (size_t t = 0; t < 20; ++t)
      test::expect_near(double{wide.logprob[t]}, double{current.logprob[t]},
                        2 * logprob_tolerance() * logprob_scale(double{current.logprob[t]}),
                        fmt::format("row {}", t));
  }
}

TEST(LogprobProperties, AFilterMovesLogprobsByTheLogarithmOfWhatSurvives) {
  const LogitRows rows = test::random_logits(20, 300, DType::f32);
  const Ints targets = large_targets(rows, 8);
  const VocabPartition vocab = test::partitions(300, world().size()).back();
  for (const SamplingFilter& filter : filters) {
    const Filtered got = filter_rows(rows, targets, vocab, DType::f32, filter, false);
    Floats plain(targets.size());
    HostStream stream;
    VocabScores scores(20, vocab, {.temperature = filter.temperature}, world());
    scores.forward(rows.shard(vocab, world().rank(), DType::f32).ref(), targets, stream, plain, {});
    int64_t finite = 0;
    for (int64_t t = 0; t < 20; ++t) {
      const auto at = static_cast<size_t>(t);
      if (std::isinf(got.logprob[at])) continue;
      ++finite;
      const std::vector<bool> kept = filter_reference(rows.row(t), filter);
      const Doubles logprobs = log_softmax_reference(rows.row(t), filter.temperature);
      double mass = 0;
      for (size_t v = 0; v < kept.size(); ++v) mass += kept[v] ? std::exp(logprobs[v]) : 0;
      test::expect_near(double{got.logprob[at]}, double{plain[at]} - std::log(mass),
                        2 * logprob_tolerance() * logprob_scale(double{plain[at]}),
                        fmt::format("row {}", t));
    }
    EXPECT_GT(finite, 10);
  }
}

TEST(LogprobProperties, RowsWithoutAGradientGetZerosUnderAFilterWhateverTheyHold) {
  LogitRows rows = test::random_logits(4, 40, DType::bf16);
  for (int64_t v = 0; v < 40; ++v) {
    rows.at(0, v) = NAN;
    rows.at(1, v) = -inf;
  }
  rows.at(2, 39) = inf;
  const Ints targets = {1, 2, 39, 39};
  for (const VocabPartition& vocab : test::partitions(40, world().size()))
    for (const SamplingFilter& filter : filters) {
      Matrix logits = rows.shard(vocab, world().rank(), DType::bf16);
      FilteredScores scores(4, vocab, DType::bf16, {filter, 8, 1}, world());
      Floats logprob(4);
      HostStream stream;
      scores.forward(logits.ref(), targets, stream, logprob);
      scores.backward(logits.ref(), targets, Floats(4, 0), logits.ref());
      const Floats got = test::elements(logits.ref());
      EXPECT_EQ(got, Floats(got.size(), 0));
    }
}

}  // namespace GYRE_FILE
}  // namespace gyre
