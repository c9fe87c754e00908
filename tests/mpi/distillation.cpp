// A student's log-probabilities at a teacher's largest logits, over all ranks, against whole rows
// in double precision.

#include "logprobs/distillation.hpp"

#include <fmt/format.h>

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
using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;

constexpr double inf = std::numeric_limits<double>::infinity();

struct Case {
  LogitRows student;
  DType type;
  int64_t token_ids;
  Ints ids;                // [tokens, token_ids]
  Floats teacher, g, d_h;  // [tokens, token_ids] twice, [tokens] or empty
};

/// The teacher's `token_ids` largest of its own rows, in descending order; with more token_ids than
/// ids, repeated.
Case make_case(int64_t tokens, int64_t vocab_size, int64_t token_ids, DType type, bool entropy) {
  Case c{test::random_logits(tokens, vocab_size, type), type, token_ids, {}, {}, {}, {}};
  const LogitRows teacher =
      test::random_logits(tokens, vocab_size, DType::f32, 2, 1, TokenTensor::teacher);
  for (int64_t t = 0; t < tokens; ++t) {
    const std::vector<TopEntry> top = top_k_reference(teacher.row(t), token_ids);
    for (size_t k = 0; k < static_cast<size_t>(token_ids); ++k) {
      c.ids.push_back(top[k % top.size()].id);
      c.teacher.push_back(static_cast<float>(top[k % top.size()].value));
    }
  }
  c.g = test::gradients(tokens, token_ids);
  c.d_h = test::gradients(entropy ? tokens : 0, 1, 2);
  return c;
}

struct Result {
  Floats student, teacher, entropy, d_logits;
};

Result run(const Case& c, const VocabPartition& vocab, bool renormalised,
           Communicator& tp = world(), int threads = 1) {
  const int64_t tokens = c.student.tokens;
  const bool entropy = !c.d_h.empty();
  Matrix logits = c.student.shard(vocab, tp.rank(), c.type);
  DistillationScores scores(tokens, vocab, {c.token_ids, renormalised, entropy, threads}, tp);
  Result r{Floats(c.ids.size(), NAN), Floats(c.ids.size(), NAN), Floats(c.d_h.size(), NAN), {}};
  HostStream stream;
  scores.forward(logits.ref(), c.teacher, c.ids, stream, r.student, r.teacher, r.entropy);
  // The gradient takes the logits' memory.
  scores.backward(logits.ref(), c.ids, c.g, c.d_h, logits.ref());
  r.d_logits = test::elements(logits.ref());
  return r;
}

/// What gradients of a row are made of, column by column.
std::vector<double> gradient_scales(const Case& c, int64_t t, bool renormalised, double h) {
  const auto row = c.student.row(t);
  const auto ids = test::row_of(c.ids, t, c.token_ids);
  const auto g = test::row_of(c.g, t, c.token_ids);
  double sum = 0;
  for (const float x : g) sum += static_cast<double>(x);
  const auto logprobs = log_softmax_reference(row);
  const auto student = distillation_reference(
      row, ids, test::doubles(test::row_of(c.teacher, t, c.token_ids)), renormalised);
  std::vector<double> scales(row.size(), 0), weights(row.size(), 0);
  for (size_t k = 0; k < ids.size(); ++k) {
    const auto id = static_cast<size_t>(ids[k]);
    weights[id] += std::abs(static_cast<double>(g[k]));
    if (renormalised) scales[id] += logit_gradient_scale(student.student[k], sum, 0, 0);
  }
  for (size_t v = 0; v < row.size(); ++v)
    scales[v] = renormalised
                    ? scales[v] + weights[v]
                    : logit_gradient_scale(logprobs[v], sum + h * student.entropy, h, weights[v]);
  return scales;
}

void expect_reference(const Case& c, const VocabPartition& vocab, bool renormalised,
                      const Result& got, int rank) {
  for (int64_t t = 0; t < c.student.tokens; ++t) {
    const auto row = c.student.row(t);
    const auto ids = test::row_of(c.ids, t, c.token_ids);
    const auto teacher = test::doubles(test::row_of(c.teacher, t, c.token_ids));
    const auto want = distillation_reference(row, ids, teacher, renormalised);
    for (size_t k = 0; k < ids.size(); ++k) {
      const size_t at = static_cast<size_t>(t * c.token_ids) + k;
      const std::string where = fmt::format("token {}, id {}", t, ids[k]);
      test::expect_logprob(got.student[at], want.student[k], "student of " + where);
      test::expect_logprob(got.teacher[at], want.teacher[k], "teacher of " + where);
    }
    const bool entropy = !c.d_h.empty();
    const double h = entropy ? static_cast<double>(c.d_h[static_cast<size_t>(t)]) : 0;
    if (entropy)
      test::expect_entropy(got.entropy[static_cast<size_t>(t)], want.entropy, c.student.vocab_size,
                           fmt::format("entropy of token {}", t));
    const auto gradient = distillation_gradient_reference(
        row, ids, test::doubles(test::row_of(c.g, t, c.token_ids)), h, renormalised);
    test::expect_gradient_row(got.d_logits, c.type, t, vocab, rank, gradient,
                              gradient_scales(c, t, renormalised, h));
  }
}

TEST(Distillation, OverAllIdsEqualsTheReferenceForAnyPartition) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool entropy : {false, true})
      // The second: every id eight times, as with a short list of a small vocabulary.
      for (const auto& [vocab_size, token_ids] : {std::pair(256, 3), {8, 64}, {700, 64}, {64, 1}}) {
        const Case c = make_case(8, vocab_size, token_ids, type, entropy);
        for (const VocabPartition& vocab : test::partitions(vocab_size, world().size())) {
          SCOPED_TRACE(fmt::format("{} of {} ids of {}, offsets {}", token_ids, vocab_size,
                                   name_of(type), fmt::join(vocab.offsets, " ")));
          const Result got = run(c, vocab, false);
          expect_reference(c, vocab, false, got, world().rank());
          test::expect_same_on_all_ranks(got.student);
          test::expect_same_on_all_ranks(got.entropy);
        }
      }
}

TEST(Distillation, RenormalisedEqualsTheReferenceForAnyPartition) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto& [vocab_size, token_ids] : {std::pair(64, 8), {8, 64}, {700, 64}, {64, 1}}) {
      const Case c = make_case(8, vocab_size, token_ids, type, false);
      for (const VocabPartition& vocab : test::partitions(vocab_size, world().size())) {
        SCOPED_TRACE(fmt::format("{} of {} ids of {}, offsets {}", token_ids, vocab_size,
                                 name_of(type), fmt::join(vocab.offsets, " ")));
        const Result got = run(c, vocab, true);
        expect_reference(c, vocab, true, got, world().rank());
        test::expect_same_on_all_ranks(got.student);
      }
    }
}

TEST(Distillation, GoldenTopFour) {
  LogitRows row(1, 64);
  const LogitRows student = test::golden_logits(), teacher = test::golden_teacher();
  std::copy_n(student.values.begin(), 64, row.values.begin());
  Case c{row, DType::bf16, 4, {29, 50, 12, 33}, {}, Floats(4, 0), {}};
  for (const int32_t id : c.ids)
    c.teacher.push_back(static_cast<float>(teacher.values[static_cast<size_t>(id)]));
  const double of_teacher[] = {-1.099062684, -1.349062684, -1.474062684, -1.724062684};
  const double all_ids[] = {-12.748163688, -4.498163688, -12.498163688, -4.248163688};
  const double renormalised[] = {-9.076200644, -0.826200644, -8.826200644, -0.576200644};
  for (const VocabPartition& vocab : test::partitions(64, world().size())) {
    const Result all = run(c, vocab, false), some = run(c, vocab, true);
    for (size_t k = 0; k < 4; ++k) {
      test::expect_logprob(all.teacher[k], of_teacher[k], "teacher");
      test::expect_logprob(some.teacher[k], of_teacher[k], "teacher");
      test::expect_logprob(all.student[k], all_ids[k], "student");
      test::expect_logprob(some.student[k], renormalised[k], "renormalised student");
    }
  }
}

TEST(Distillation, RenormalisedIsAllIdsMadeToSumToOne) {
  const Case c = make_case(12, 64, 8, DType::f32, false);
  const VocabPartition vocab = test::partitions(64, world().size()).front();
  const Result all = run(c, vocab, false), some = run(c, vocab, true);
  for (size_t t = 0; t < 12; ++t) {
    double sum = 0;
    for (size_t k = 0; k < 8; ++k) sum += std::exp(static_cast<double>(all.student[8 * t + k]));
    for (size_t k = 0; k < 8; ++k)
      test::expect_logprob(some.student[8 * t + k],
                           static_cast<double>(all.student[8 * t + k]) - std::log(sum),
                           fmt::format("token {}, entry {}", t, k));
  }
}

TEST(Distillation, LogitsOfMinusInfinityAreExcludedIds) {
  Case c = make_case(3, 40, 4, DType::f32, false);
  for (size_t k : {0, 2}) c.student.at(0, c.ids[k]) = -inf;    // the student alone
  c.teacher[4] = -INFINITY, c.student.at(1, c.ids[4]) = -inf;  // both
  for (int64_t v = 0; v < 40; ++v) c.student.at(2, v) = -inf;  // but for one of the ids
  c.student.at(2, c.ids[9]) = 1;
  for (const bool renormalised : {false, true})
    for (const VocabPartition& vocab : test::partitions(40, world().size())) {
      const Result got = run(c, vocab, renormalised);
      expect_reference(c, vocab, renormalised, got, world().rank());
      EXPECT_EQ(got.student[0], -INFINITY);
      EXPECT_EQ(got.teacher[4], -INFINITY);
      EXPECT_EQ(got.student[9], 0);
    }
}

TEST(Distillation, ANaNOfAnyShardReachesAllRanks) {
  Case c = make_case(2, 40, 3, DType::bf16, false);
  c.student.at(0, 39) = NAN;
  c.student.at(1, c.ids[3]) = NAN;
  const VocabPartition vocab = test::partitions(40, world().size()).back();
  const Result all = run(c, vocab, false), some = run(c, vocab, true);
  for (size_t k = 0; k < 3; ++k) {
    EXPECT_TRUE(std::isnan(all.student[k]));
    EXPECT_EQ(std::isnan(some.student[k]),
              std::find(c.ids.begin(), c.ids.begin() + 3, 39) != c.ids.begin() + 3);
    EXPECT_TRUE(std::isnan(some.student[3 + k]));
  }
}

TEST(Distillation, TokensWithoutAGradientGetZerosWhateverTheyHold) {
  Case c = make_case(3, 40, 3, DType::bf16, false);
  for (int64_t v = 0; v < 40; ++v) {
    c.student.at(0, v) = NAN;
    c.student.at(1, v) = v % 2 == 0 ? inf : -inf;
    c.student.at(2, v) = -inf;
  }
  c.g.assign(9, 0);
  for (const bool renormalised : {false, true})
    for (const VocabPartition& vocab : test::partitions(40, world().size())) {
      const Floats got = run(c, vocab, renormalised).d_logits;
      EXPECT_EQ(got, Floats(got.size(), 0));
    }
}

TEST(Distillation, GradientsOfATokenThatAddUpToZeroAreStillGradients) {
  Case c = make_case(4, 40, 2, DType::f32, false);
  for (size_t i = 0; i < c.g.size(); ++i) c.g[i] = i % 2 == 0 ? 1.0F : -1.0F;
  for (const bool renormalised : {false, true}) {
    const VocabPartition vocab = test::partitions(40, world().size()).back();
    expect_reference(c, vocab, renormalised, run(c, vocab, renormalised), world().rank());
  }
}

TEST(Distillation, ResultsDoNotDependOnTheSizeOfTheGroup) {
  for (const bool renormalised : {false, true}) {
    const Case c = make_case(6, 203, 5, DType::bf16, !renormalised);
    for (const int ranks : {1, 2, world().size()}) {
      SCOPED_TRACE(fmt::format("groups of {}", ranks));
      const std::unique_ptr<Communicator> group = world().split(world().rank() / ranks);
      const VocabPartition vocab = balanced_partition(203, group->size());
      expect_reference(c, vocab, renormalised, run(c, vocab, renormalised, *group), group->rank());
    }
  }
}

TEST(Distillation, TheSameBitsAgainAndForAnyNumberOfThreads) {
  for (const bool renormalised : {false, true}) {
    const Case c = make_case(150, 70, 5, DType::bf16, !renormalised);
    const VocabPartition vocab = test::partitions(70, world().size()).back();
    const Result once = run(c, vocab, renormalised);
    for (const int threads : {1, 3}) {
      const Result again = run(c, vocab, renormalised, world(), threads);
      EXPECT_EQ(test::digest<float>(again.student), test::digest<float>(once.student));
      EXPECT_EQ(test::digest<float>(again.teacher), test::digest<float>(once.teacher));
      EXPECT_EQ(test::digest<float>(again.d_logits), test::digest<float>(once.d_logits));
    }
  }
}

TEST(Distillation, OneCollectiveForwardAndNoneBackward) {
  const int n = world().size();
  const VocabPartition vocab = balanced_partition(50, n);
  for (const bool renormalised : {false, true}) {
    const Case c = make_case(10, 50, 4, DType::f32, !renormalised);
    Matrix logits = c.student.shard(vocab, world().rank(), DType::f32);
    DistillationScores scores(10, vocab, {4, renormalised, !renormalised, 1}, world());
    Floats student(40), teacher(40), entropy(c.d_h.size());
    HostStream stream;
    const test::TrafficSince forward(world());
    scores.forward(logits.ref(), c.teacher, c.ids, stream, student, teacher, entropy);
    EXPECT_EQ(forward.messages(), n > 1 ? 1 : 0);
    const int64_t all_gather = (n - 1) * 10 * 4 * (2 + 4 + 1),
                  all_reduce = 2 * (n - 1) * 10 * 4 * 4 / n;
    EXPECT_EQ(forward.bytes(), renormalised ? all_reduce : all_gather);
    const test::TrafficSince backward(world());
    scores.backward(logits.ref(), c.ids, c.g, c.d_h, logits.ref());
    EXPECT_EQ(backward.messages(), 0);
  }
}

TEST(Distillation, WrongArgumentsEndAllRanksAlike) {
  const int n = world().size();
  const VocabPartition vocab = balanced_partition(30, n);
  const auto error = [](int64_t tokens, const VocabPartition& v, const DistillationOptions& o) {
    return agreed_message([&] { DistillationScores(tokens, v, o, world()); });
  };
  const bool last = on_last_rank();
  EXPECT_EQ(error(4, vocab, {.token_ids = 2}), "no error");
  EXPECT_EQ(error(4, vocab, {.token_ids = last ? 0 : 2}),
            "0 ids a token; the fewest are 1" + test::found_on(n - 1));
  EXPECT_EQ(error(4, vocab, {.token_ids = 5, .renormalised = true, .entropy = true}),
            "an entropy needs the whole vocabulary, but the student is renormalised over 5 ids");
  EXPECT_EQ(error(4, vocab, {.token_ids = 5, .renormalised = last}),
            differs("distillation", "whether the student is renormalised over the ids", "0", "1"));
  EXPECT_EQ(error(4, vocab, {.token_ids = last ? 3 : 2}),
            differs("log-probabilities", "the number of ids a token", "2", "3"));
  EXPECT_EQ(error(last ? 3 : 4, vocab, {.token_ids = 2, .renormalised = true}),
            differs("logits of ids", "the number of tokens", "4", "3"));
}

}  // namespace GYRE_FILE
}  // namespace gyre
