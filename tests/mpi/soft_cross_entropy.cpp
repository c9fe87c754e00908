// Cross entropies between a teacher's and a student's distribution, both split over all ranks,
// against whole rows in double precision.

#include <fmt/format.h>

#include <numeric>

#include "errors.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "score_checks.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::differs;
using test::LogitRows;
using test::Matrix;
using test::on_last_rank;
using test::world;
using Floats = std::vector<float>;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

struct Result {
  Floats value, d_student;
};

struct Pair {
  LogitRows student, teacher;
  DType student_type, teacher_type;
};

Pair random_pair(int64_t tokens, int64_t vocab_size, DType student, DType teacher, double size) {
  return {test::random_logits(tokens, vocab_size, student, size),
          test::random_logits(tokens, vocab_size, teacher, size, 1, TokenTensor::teacher), student,
          teacher};
}

/// With `in_place`, the gradient takes the student's memory.
Result run(const Pair& pair, const VocabPartition& vocab, const Floats& g,
           Communicator& tp = world(), int threads = 1, bool in_place = false) {
  Matrix student = pair.student.shard(vocab, tp.rank(), pair.student_type);
  const Matrix teacher = pair.teacher.shard(vocab, tp.rank(), pair.teacher_type);
  SoftCrossEntropy loss(pair.student.tokens, vocab, threads, tp);
  Result result{Floats(g.size(), NAN), {}};
  HostStream stream;
  loss.forward(student.ref(), teacher.ref(), stream, result.value);
  Matrix elsewhere(pair.student.tokens, student.cols(), pair.student_type);
  const MatrixRef d_student = in_place ? student.ref() : elsewhere.ref();
  loss.backward(student.ref(), teacher.ref(), g, d_student);
  result.d_student = test::elements(d_student);
  return result;
}

void expect_reference(const Pair& pair, const VocabPartition& vocab, const Floats& g,
                      const Result& got, int rank) {
  for (int64_t t = 0; t < pair.student.tokens; ++t) {
    const auto at = static_cast<size_t>(t);
    const auto student = pair.student.row(t), teacher = pair.teacher.row(t);
    test::expect_logprob(got.value[at], soft_cross_entropy_reference(student, teacher),
                         fmt::format("cross entropy of token {}", t));
    const auto weight = static_cast<double>(g[at]);
    const auto want = soft_cross_entropy_gradient_reference(student, teacher, weight);
    const auto log_q = log_softmax_reference(student), log_p = log_softmax_reference(teacher);
    std::vector<double> scale;
    for (size_t v = 0; v < want.size(); ++v)
      scale.push_back(logit_gradient_scale(log_q[v], weight, 0, 0) +
                      logit_gradient_scale(log_p[v], weight, 0, 0));
    test::expect_gradient_row(got.d_student, pair.student_type, t, vocab, rank, want, scale);
  }
}

TEST(SoftCrossEntropy, RandomRowsEqualTheReferenceForAnyPartition) {
  for (const int64_t vocab_size : {37, 515})
    for (const DType student : {DType::f32, DType::bf16})
      for (const DType teacher : {DType::f32, DType::bf16}) {
        const Pair pair = random_pair(12, vocab_size, student, teacher, 3);
        const Floats g = test::gradients(12, 1);
        for (const VocabPartition& vocab : test::partitions(vocab_size, world().size())) {
          SCOPED_TRACE(fmt::format("{} and {}, offsets {}", name_of(student), name_of(teacher),
                                   fmt::join(vocab.offsets, " ")));
          const Result got = run(pair, vocab, g);
          expect_reference(pair, vocab, g, got, world().rank());
          test::expect_same_on_all_ranks(got.value);
        }
      }
}

TEST(SoftCrossEntropy, GoldenRows) {
  const Pair pair{test::golden_logits(), test::golden_teacher(), DType::bf16, DType::bf16};
  const double value[] = {8.344218829, 7.786752955, 7.138260753, 7.456781096,
                          7.809284165, 9.052951627, 7.284411675, 6.842543003};
  const double d_student[] = {-3.374e-6, -6.9801e-5, -1.321022e-3, -2.4117012e-2};
  for (const VocabPartition& vocab : test::partitions(64, world().size())) {
    const Result got = run(pair, vocab, Floats(16, 1));
    for (size_t s = 0; s < 8; ++s) test::expect_logprob(got.value[s], value[s], "golden row");
    test::expect_near(std::accumulate(got.value.begin(), got.value.end(), 0.0), 124.937161405,
                      logprob_tolerance() * 124, "sum");
    for (int64_t c = 0; c < vocab.columns(world().rank()); ++c)
      if (const int64_t id = vocab.begin(world().rank()) + c; id < 4) {
        const double want = d_student[id];
        test::expect_near(static_cast<double>(got.d_student[static_cast<size_t>(c)]), want,
                          logit_gradient_tolerance(DType::bf16) * std::abs(want) + 5e-10,
                          fmt::format("gradient of id {}", id));
      }
  }
}

TEST(SoftCrossEntropy, ARampAgainstItsReverse) {
  Pair pair{LogitRows(1, 5), LogitRows(1, 5), DType::f32, DType::f32};
  for (int64_t v = 0; v < 5; ++v) {
    pair.student.at(0, v) = static_cast<double>(v);
    pair.teacher.at(0, v) = static_cast<double>(4 - v);
  }
  for (const VocabPartition& vocab : test::partitions(5, world().size()))
    test::expect_logprob(run(pair, vocab, {1}).value[0], 3.903855964, "the ramp");
}

/// Rows that break careless cross entropies, whole and in any one shard.
Pair special_pair(DType type) {
  Pair pair = random_pair(12, 24, type, type, 3);
  const double offset = type == DType::f32 ? 1e4 : 512, step = type == DType::f32 ? 0.25 : 4;
  for (int64_t v = 0; v < 24; ++v) {
    pair.student.at(0, v) = offset + step * static_cast<double>(v % 5);
    pair.teacher.at(0, v) = -offset - step * static_cast<double>(v % 3);
    pair.student.at(1, v) *= v % 2 == 0 ? 64 : -32;  // far apart
    pair.student.at(2, v) = pair.teacher.at(2, v) = 0;
  }
  for (const int64_t v : {0, 9, 23}) {
    pair.student.at(3, v) = pair.teacher.at(3, v) = -inf;  // a column that both mask
    pair.teacher.at(4, v) = -inf;                          // the teacher alone
    pair.student.at(5, v) = -inf;                          // the student alone: infinite
  }
  for (int64_t v = 0; v < 12; ++v) {
    pair.student.at(6, v) = pair.teacher.at(6, v) = -inf;  // whole shards that both mask
    pair.teacher.at(7, v) = -inf;
    pair.student.at(8, v) = -inf;
  }
  pair.student.at(9, 4) = nan;
  pair.teacher.at(10, 23) = nan;
  pair.teacher.at(11, 0) = inf;
  return pair;
}

TEST(SoftCrossEntropy, SpecialLogitsHaveTheValuesOfTheReference) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const Pair pair = special_pair(type);
    const Floats g(12, 0.5F);
    for (const VocabPartition& vocab : test::partitions(24, world().size())) {
      SCOPED_TRACE(fmt::format("{}, offsets {}", name_of(type), fmt::join(vocab.offsets, " ")));
      const Result got = run(pair, vocab, g);
      expect_reference(pair, vocab, g, got, world().rank());
      EXPECT_TRUE(std::isfinite(got.value[3]) && std::isfinite(got.value[4]));
      EXPECT_EQ(got.value[5], INFINITY);
      EXPECT_TRUE(std::isfinite(got.value[6]) && std::isfinite(got.value[7]));
      EXPECT_EQ(got.value[8], INFINITY);
      for (size_t t = 9; t < 12; ++t) EXPECT_TRUE(std::isnan(got.value[t])) << "row " << t;
      test::expect_same_on_all_ranks(got.value);
    }
  }
}

TEST(SoftCrossEntropy, RowsThatAreNoDistributionAreNaN) {
  test::on_every_simd_target([] {
    for (const bool of_student : {false, true}) {
      Pair pair = random_pair(1, 24, DType::f32, DType::f32, 1);
      for (double& z : (of_student ? pair.student : pair.teacher).values) z = -inf;
      for (const VocabPartition& vocab : test::partitions(24, world().size()))
        EXPECT_TRUE(std::isnan(run(pair, vocab, {1}).value[0]));
    }
  });
}

TEST(SoftCrossEntropy, IsInfiniteHoweverSmallTheShareThatTheStudentExcludes) {
  Pair pair = random_pair(2, 24, DType::f32, DType::f32, 1);
  for (int64_t v = 0; v < 12; ++v) {
    for (const int64_t t : {0, 1}) pair.teacher.at(t, v) -= 5000;
    pair.student.at(0, v) = -inf;
  }
  pair.student.at(1, 7) = -inf;
  std::vector<VocabPartition> all = test::partitions(24, world().size());
  std::vector<int64_t> halves(static_cast<size_t>(world().size()), 0);
  halves.front() += 12;
  halves.back() += 12;
  all.push_back(partition_of(halves, 24));
  for (const VocabPartition& vocab : all)
    EXPECT_EQ(run(pair, vocab, {1, 1}).value, (Floats{INFINITY, INFINITY}))
        << fmt::format("offsets {}", fmt::join(vocab.offsets, " "));
}

TEST(SoftCrossEntropy, TheGradientMayTakeTheStudentsMemory) {
  const Pair pair = random_pair(7, 90, DType::bf16, DType::f32, 2);
  const Floats g = test::gradients(7, 1);
  const VocabPartition vocab = test::partitions(90, world().size()).front();
  EXPECT_EQ(run(pair, vocab, g, world(), 1, true).d_student, run(pair, vocab, g).d_student);
}

TEST(SoftCrossEntropy, ResultsDoNotDependOnTheSizeOfTheGroup) {
  const Pair pair = random_pair(9, 203, DType::f32, DType::bf16, 4);
  const Floats g = test::gradients(9, 1);
  for (const int ranks : {1, 2, world().size()}) {
    SCOPED_TRACE(fmt::format("groups of {}", ranks));
    const std::unique_ptr<Communicator> group = world().split(world().rank() / ranks);
    const VocabPartition vocab = balanced_partition(203, group->size());
    expect_reference(pair, vocab, g, run(pair, vocab, g, *group), group->rank());
  }
}

TEST(SoftCrossEntropy, TheSameBitsAgainAndForAnyNumberOfThreads) {
  const Pair pair = random_pair(300, 70, DType::bf16, DType::bf16, 3);
  const Floats g = test::gradients(300, 1);
  const VocabPartition vocab = test::partitions(70, world().size()).back();
  const Result once = run(pair, vocab, g);
  for (const int threads : {1, 3}) {
    const Result again = run(pair, vocab, g, world(), threads);
    EXPECT_EQ(test::digest<float>(again.value), test::digest<float>(once.value));
    EXPECT_EQ(test::digest<float>(again.d_student), test::digest<float>(once.d_student));
  }
}

TEST(SoftCrossEntropy, OneCollectiveOf20BytesATokenAndNoneBackward) {
  const int n = world().size();
  const VocabPartition vocab = balanced_partition(50, n);
  const Pair pair = random_pair(10, 50, DType::f32, DType::f32, 1);
  const Matrix student = pair.student.shard(vocab, world().rank(), DType::f32);
  const Matrix teacher = pair.teacher.shard(vocab, world().rank(), DType::f32);
  SoftCrossEntropy loss(10, vocab, 1, world());
  Floats value(10);
  HostStream stream;
  const test::TrafficSince forward(world());
  loss.forward(student.ref(), teacher.ref(), stream, value);
  EXPECT_EQ(forward.messages(), n > 1 ? 1 : 0);
  EXPECT_EQ(forward.bytes(), (n - 1) * 10 * 20);
  Matrix d_student(10, student.cols(), DType::f32);
  const test::TrafficSince backward(world());
  loss.backward(student.ref(), teacher.ref(), value, d_student.ref());
  EXPECT_EQ(backward.messages(), 0);
}

TEST(SoftCrossEntropy, WrongArgumentsEndAllRanksAlike) {
  const int n = world().size();
  const auto error = [](int64_t tokens, const VocabPartition& vocab) {
    return agreed_message([&] { SoftCrossEntropy(tokens, vocab, 1, world()); });
  };
  const VocabPartition vocab = even_partition(16 * n, 16 * n, n);
  const std::string what = "soft cross entropies";
  EXPECT_EQ(error(4, vocab), "no error");
  EXPECT_EQ(error(on_last_rank() ? 5 : 4, vocab), differs(what, "the number of tokens", "4", "5"));
  EXPECT_EQ(error(on_last_rank() ? -5 : 4, vocab),
            "-5 tokens; the fewest are 0" + test::found_on(n - 1));
  VocabPartition other = vocab;
  other.vocab_size -= on_last_rank() ? 1 : 0;
  EXPECT_EQ(error(4, other), differs(what, "the number of ids of the vocabulary",
                                     std::to_string(16 * n), std::to_string(16 * n - 1)));
  EXPECT_EQ(error(4, balanced_partition(9, n + 2)),
            fmt::format("a vocabulary in {} shards for a group of {} ranks; it must be one shard a "
                        "rank",
                        n + 2, n));
}

}  // namespace GYRE_FILE
}  // namespace gyre
