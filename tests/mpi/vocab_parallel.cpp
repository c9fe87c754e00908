// Log-probabilities and entropies from a vocabulary split over all ranks, soft cross entropies and
// raw logits of ids, and their gradients, against whole rows in double precision.

#include <fmt/ranges.h>

#include "selection_operations.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test;

GYRE_TEST_OPERATION(LogProbabilities);
GYRE_TEST_OPERATION(CrossEntropies);
GYRE_TEST_OPERATION(LogitsOfIds);

/// Scores of slices of `chunk` rows, one after the other, by one object; gradients in place.
OperationResult score_slices(const LogProbabilities& o, const VocabPartition& vocab,
                             int64_t chunk) {
  const auto part_of = [](const auto& values, int64_t begin, int64_t count, int64_t row) {
    return std::span(values).subspan(begin * row, count * row);
  };
  const int64_t k = o.options.ids_per_token;
  Matrix logits = o.rows.shard(vocab, world().rank(), o.type);
  OperationResult r{{Floats(o.ids.size()), Floats(o.h.size())}, {}};
  VocabScores scores(0, vocab, o.options, world());
  HostStream stream;
  for (int64_t begin = 0; begin < o.rows.tokens; begin += chunk) {
    const int64_t n = std::min(chunk, o.rows.tokens - begin);
    MatrixRef slice = logits.ref();
    slice.data += begin * slice.stride * static_cast<int64_t>(size_of(o.type));
    slice.rows = n;
    const TrafficSince resizing(world());
    scores.resize(n);
    EXPECT_EQ(resizing.messages(), 0);
    scores.forward(slice, part_of(o.ids, begin, n, k), stream,
                   std::span(r.values[0]).subspan(begin * k, n * k),
                   std::span(r.values[1]).subspan(begin, n));
    scores.backward(slice, part_of(o.ids, begin, n, k),
                    {part_of(o.g, begin, n, k), part_of(o.h, begin, n, 1)}, slice);
  }
  r.d_logits = elements(logits.ref());
  return r;
}

TEST(VocabParallel, SlicesOfAnyLengthByOneObjectHaveTheBitsOfTheWhole) {
  for (const auto& [vocab_size, type] :
       {std::pair<int64_t, DType>{11, DType::f32}, {13, DType::bf16}, {200, DType::f32}}) {
    const LogProbabilities o("", random_logits(10, vocab_size, type), type, {2, true, 0.75});
    for (const VocabPartition& vocab : partitions(vocab_size, world().size())) {
      const OperationResult whole = o.run({vocab, Place()});
      // The last slice is shorter; the first is longer than all rows.
      for (const int64_t chunk : {16, 1, 2, 3})
        EXPECT_TRUE(score_slices(o, vocab, chunk).same_bits(whole)) << "slices of " << chunk;
    }
  }
}

TEST(VocabParallel, GradientsOfAnotherTypeThanTheLogits) {
  const VocabPartition vocab = partitions(77, world().size()).front();
  for (const DType type : both_types) {
    const DType other = type == DType::f32 ? DType::bf16 : DType::f32;
    LogProbabilities o("", random_logits(9, 77, DType::bf16), type, {2, true, 0.8});
    const Matrix logits = o.rows.shard(vocab, world().rank(), type);
    OperationResult r{{Floats(18), Floats(9)}, {}};
    VocabScores scores(9, vocab, o.options, world());
    HostStream stream;
    scores.forward(logits.ref(), o.ids, stream, r.values[0], r.values[1]);
    Matrix d_logits(9, logits.cols(), other);
    scores.backward(logits.ref(), o.ids, {o.g, o.h}, d_logits.ref());
    r.d_logits = elements(d_logits.ref());
    o.type = other;
    o.expect_reference(r, {vocab, Place()});
  }
}

TEST(VocabParallel, LogSoftmaxOfAllColumns) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const double temperature : {1.0, 1.5})
      for (const VocabPartition& vocab : partitions(256, world().size())) {
        const LogitRows rows = random_logits(15, 256, type);
        const Matrix logits = rows.shard(vocab, world().rank(), type);
        VocabScores scores(15, vocab, {.ids_per_token = 0, .temperature = temperature}, world());
        HostStream stream;
        scores.forward(logits.ref(), {}, stream, {}, {});
        Matrix log_p(15, logits.cols(), DType::f32), p(15, logits.cols(), DType::f32);
        scores.write_log_softmax(logits.ref(), false, log_p.ref());
        scores.write_log_softmax(logits.ref(), true, p.ref());
        for (int64_t t = 0; t < 15; ++t) {
          const auto want = log_softmax_reference(rows.row(t), temperature);
          const RowNormalizer n = scores.normalizers()[t];
          expect_logprob(n.max / static_cast<float>(temperature) + n.log_sum,
                         rows.row(t)[0] / temperature - want[0], "log-sum-exp");
          for (int64_t c = 0; c < logits.cols(); ++c) {
            const int64_t id = vocab.begin(world().rank()) + c;
            const double x = id < 256 ? want[id] : -infinity;
            expect_logprob(log_p.ref().at(t, c), x, fmt::format("log p of {}", id));
            expect_near(p.at(t, c), std::exp(x),
                        logprob_tolerance() * logprob_scale(x) * std::exp(x),
                        fmt::format("p of {}", id));
          }
        }
      }
}

TEST(VocabParallel, GradientOfLogSoftmax) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const double temperature : {1.0, 1.5})
      for (const VocabPartition& vocab : partitions(253, world().size())) {
        const int rank = world().rank();
        LogitRows rows = random_logits(12, 253, type);
        const LogitRows g = random_logits(12, 253, type, 1, 3, TokenTensor::d_logprobs);
        for (int64_t v = 0; v < 126; ++v) rows.at(5, v) = -infinity;
        Matrix logits = rows.shard(vocab, rank, type);
        const Matrix above = g.shard(vocab, rank, type);
        VocabScores scores(12, vocab, {.ids_per_token = 0, .temperature = temperature}, world());
        HostStream stream;
        scores.forward(std::as_const(logits).ref(), {}, stream, {}, {});
        const TrafficSince sent(world());
        scores.log_softmax_backward(std::as_const(logits).ref(), above.ref(), stream, logits.ref());
        EXPECT_EQ(sent.bytes(), 12 * 8 * (world().size() - 1));
        for (int64_t t = 0; t < 12; ++t) {
          const auto want = log_softmax_gradient_reference(rows.row(t), g.row(t), temperature);
          const auto logprob = log_softmax_reference(rows.row(t), temperature);
          double sizes = 0;
          for (const double x : g.row(t)) sizes += std::abs(x / temperature);
          for (int64_t c = 0; c < logits.cols(); ++c) {
            const int64_t id = vocab.begin(rank) + c;
            const int64_t v = id;
            const std::string where = fmt::format("token {}, id {}", t, id);
            if (id >= 253)
              EXPECT_EQ(logits.at(t, c), 0) << where;
            else
              expect_near(logits.at(t, c), want[v],
                          logit_gradient_tolerance(type) *
                              logit_gradient_scale(logprob[v], sizes, 0,
                                                   std::abs(g.row(t)[v]) / temperature),
                          where);
          }
        }
      }
}

TEST(VocabParallel, NoMemoryOfTheSizeOfTheLogits) {
  const int64_t tokens = 512, columns = 1024;
  const VocabPartition vocab =
      even_partition(columns * world().size(), columns * world().size(), world().size());
  Matrix logits(tokens, columns, DType::bf16);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < columns; ++c) logits.set(t, c, static_cast<double>((t + 7 * c) % 13));
  const Ints ids(tokens, 3);
  Floats logprob(ids.size()), entropy(ids.size());
  HostStream stream;
  reset_memory_peak();
  const int64_t before = memory_use().peak_bytes;
  VocabScores scores(tokens, vocab, {.ids_per_token = 1, .entropy = true, .temperature = 2},
                     world());
  scores.forward(logits.ref(), ids, stream, logprob, entropy);
  scores.backward(logits.ref(), ids, {logprob, entropy}, logits.ref());
  const int64_t used = memory_use().peak_bytes - before;
  EXPECT_GE(used, tokens * 12);
  EXPECT_LT(used, tokens * columns / 2) << "half a byte an element";
}

std::string error_of(int64_t tokens, const VocabPartition& vocab, const ScoreOptions& options) {
  return agreed_message([&] { VocabScores(tokens, vocab, options, world()); });
}

TEST(VocabParallel, WrongOptionsEndAllRanksAlike) {
  const VocabPartition vocab = balanced_partition(20, world().size());
  const bool last = on_last_rank();
  const std::string what = LogProbabilities::agreement;
  EXPECT_EQ(error_of(4, vocab, {.ids_per_token = last ? 2 : 1}),
            differs(what, "the number of ids a token", "1", "2"));
  EXPECT_EQ(error_of(4, vocab, {.entropy = last}),
            differs(what, "whether entropies are wanted", "0", "1"));
  EXPECT_EQ(error_of(4, vocab, {.temperature = last ? 0.7 : 1}),
            differs(what, "the temperature", "1", "0.7"));
  EXPECT_EQ(error_of(4, vocab, {.ids_per_token = -2}), "-2 ids a token; the fewest are 0");
  for (const auto& [temperature, text] : {std::pair(0.0, "0"),
                                          {-1.0, "-1"},
                                          {infinity, "inf"},
                                          {not_a_number, "nan"},
                                          {1e-39, "1e-39"},
                                          {1e39, "1e+39"}})
    EXPECT_EQ(error_of(4, vocab, {.temperature = temperature}),
              fmt::format("a temperature of {}; it must be positive and finite, and so its inverse "
                          "in f32",
                          text));
  const auto gathered = [&](int64_t ids_per_token) {
    return agreed_message([&] { GatheredLogits(4, vocab, ids_per_token, 1, world()); });
  };
  EXPECT_EQ(gathered(last ? 3 : 2),
            differs(LogitsOfIds::agreement, "the number of ids a token", "2", "3"));
  EXPECT_EQ(gathered(last ? -7 : 0),
            "-7 ids a token; the fewest are 0" + found_on(world().size() - 1));
}

TEST(GatheredLogits, ReadsNothingElse) {
  const VocabPartition vocab = partitions(50, world().size()).front();
  LogitRows rows(3, 50);
  for (double& z : rows.values) z = NAN;
  rows.at(0, 0) = 1.5, rows.at(1, 49) = -2, rows.at(2, 20) = -infinity;
  LogitsOfIds o(rows, DType::bf16, 2);
  o.ids = {0, -1, 50, 49, 20, 51};
  EXPECT_EQ(o.run({vocab, Place()}).values[0], (Floats{1.5, 0, 0, -2, -INFINITY, 0}));
}

TEST(SoftCrossEntropy, RowsThatAreNoDistributionAreNaN) {
  on_every_simd_target([] {
    for (const bool of_student : {false, true}) {
      CrossEntropies pair = CrossEntropies::random(1, 24, DType::f32, DType::f32, 1);
      for (double& z : (of_student ? pair.rows : pair.teacher).values) z = -infinity;
      for (const VocabPartition& vocab : partitions(24, world().size()))
        EXPECT_TRUE(std::isnan(pair.run({vocab, Place()}).values[0][0]));
    }
  });
}

TEST(SoftCrossEntropy, IsInfiniteHoweverSmallTheShareThatTheStudentExcludes) {
  CrossEntropies pair = CrossEntropies::random(2, 24, DType::f32, DType::f32, 1);
  for (int64_t v = 0; v < 12; ++v) {
    for (const int64_t t : {0, 1}) pair.teacher.at(t, v) -= 5000;
    pair.rows.at(0, v) = -infinity;
  }
  pair.rows.at(1, 7) = -infinity;
  std::vector<VocabPartition> all = partitions(24, world().size());
  std::vector<int64_t> halves(world().size(), 0);
  halves.front() += 12;
  halves.back() += 12;
  all.push_back(partition_of(halves, 24));
  for (const VocabPartition& vocab : all)
    EXPECT_EQ(pair.run({vocab, Place()}).values[0], (Floats{INFINITY, INFINITY}))
        << fmt::format("offsets {}", fmt::join(vocab.offsets, " "));
}

}  // namespace GYRE_FILE
}  // namespace gyre
