// The references of log-probabilities themselves: numbers worked out elsewhere, finite differences,
// and properties that hold for any row.

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "apps/logprobs/registry.hpp"
#include "io/schemas/logprobs_file.hpp"
#include "io_files.hpp"
#include "logprob_cases.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace GYRE_FILE {

using Doubles = std::vector<double>;
using Ints = std::vector<int32_t>;
using Bools = std::vector<bool>;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double nine_decimals = 0.6e-9;  // of what is printed with nine

void expect_values(const Doubles& got, const Doubles& want, double tolerance = nine_decimals) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;  // infinities
    EXPECT_NEAR(got[i], want[i], tolerance) << "element " << i;
  }
}

double sum(const Doubles& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}
const test::LogitRows& student() {
  static const test::LogitRows rows = test::golden_logits();
  return rows;
}
const test::LogitRows& teacher() {
  static const test::LogitRows rows = test::golden_teacher();
  return rows;
}
const Doubles ramp = {0, 1, 2, 3, 4};

TEST(LogprobsReference, GradientThroughLogSoftmaxByHand) {
  const Doubles row = {0, std::log(2.0), -inf};  // p = 1/3, 2/3, 0
  expect_values(log_softmax_gradient_reference(row, Doubles{3, 0, 0}), {2, -2, 0});
  expect_values(log_softmax_gradient_reference(row, Doubles{1, 2, 0}), {0, 0, 0});
  expect_values(log_softmax_gradient_reference(row, Doubles{0, 0, 3}), {-1, -2, 3});
  const Doubles hot = {0, 2 * std::log(2.0)};
  expect_values(log_softmax_gradient_reference(hot, Doubles{3, 0}, 2), {1, -1});
}

TEST(LogprobsReference, ProjectedProbabilitiesByHand) {
  const Doubles row = {0, std::log(2.0), -inf, 0};  // p = 1/4, 1/2, 0, 1/4
  const std::vector<int64_t> offsets = {0, 2, 3, 4, 4};
  const Ints columns = {0, 1, 1, 0};
  const std::vector<float> weights = {1, 0.5F, 2, 8};
  const SparseMatrixRef matrix{3, offsets, columns, weights};
  expect_values(projected_reference(row, matrix), {0.25, 1.125, 0});
  // g = 1 + 0.5 · 2, 2 · 2, 8, 0, whose mean is 2.5.
  expect_values(projected_gradient_reference(row, matrix, Doubles{1, 2, 5}),
                {-0.125, 0.75, 0, -0.625});
  expect_values(projected_gradient_reference(row, matrix, Doubles{0, 0, 0}), {0, 0, 0, 0});
  const Doubles hot = {0, 2 * std::log(2.0), -inf, 0};
  expect_values(projected_reference(hot, matrix, 2), {0.25, 1.125, 0});
  expect_values(projected_gradient_reference(hot, matrix, Doubles{1, 2, 5}, 2),
                {-0.0625, 0.375, 0, -0.3125});
  for (const double x : projected_reference(Doubles{0, nan, 0, 0}, matrix))
    EXPECT_TRUE(std::isnan(x));
}

/// Every answer of inputs/logprobs_golden.h5. The generator of the file compares some of them with
/// numbers that were worked out elsewhere.
TEST(LogprobsReference, GivesTheAnswersOfTheGoldenFile) {
  const LogprobsFile f =
      read_logprobs_file(test::world(), test::input("logprobs_golden.h5"), logprobs_arrays());
  const SamplingFilter filter{f.top_k, f.top_p, f.temperature};
  const auto expect = [&](const std::string& name, int64_t row, const Doubles& got) {
    const Doubles& all = f.reference->arrays.at(name);
    const auto begin = all.begin() + row * std::ssize(got);
    expect_values(got, Doubles(begin, begin + std::ssize(got)), 1e-12);
  };
  for (int64_t t = 0; t < 16; ++t) {
    SCOPED_TRACE(t);
    const std::span<const double> z = student().row(t), other = teacher().row(t);
    const int32_t target = f.ints("targets")[t];
    const Ints ids(f.ints("ids").begin() + 4 * t, f.ints("ids").begin() + 4 * t + 4);
    const double g = static_cast<double>(f.floats("d_value")[t]);
    const Doubles logp = log_softmax_reference(z);
    Doubles gathered;
    for (const int32_t id : ids) gathered.push_back(logp[id]);
    expect("logprob", t, {score_row_reference(z, target).logprob});
    expect("entropy", t, {score_row_reference(z, target).entropy});
    expect("gathered", t, gathered);
    expect("soft_cross_entropy", t, {soft_cross_entropy_reference(z, other)});
    expect("filtered_logprob", t, {filtered_logprob_reference(z, target, filter)});
    expect("d_logprob", t, score_gradient_reference(z, Ints{target}, Doubles{g}, 0));
    expect("d_entropy", t, score_gradient_reference(z, {}, {}, g));
    expect("d_gathered", t, score_gradient_reference(z, ids, Doubles(4, g), 0));
    expect("d_soft_cross_entropy", t, soft_cross_entropy_gradient_reference(z, other, g));
    expect("d_filtered_logprob", t, filtered_gradient_reference(z, target, filter, g));
    if (t % 8 < 7)
      expect("next_token_logprob", t - t / 8,
             {score_row_reference(z, f.ints("targets")[t + 1]).logprob});
  }
}

Ints top_ids(std::span<const double> row, int64_t k) {
  Ints ids;
  for (const TopEntry& entry : top_k_reference(row, k)) ids.push_back(entry.id);
  return ids;
}

TEST(LogprobsReference, GoldenTopFive) {
  EXPECT_EQ(top_ids(student().row(0), 5), (Ints{57, 17, 34, 51, 11}));
  EXPECT_EQ(top_ids(student().row(15), 5), (Ints{8, 25, 42, 2, 59}));
  Doubles values;
  for (const TopEntry& entry : top_k_reference(student().row(0), 5)) values.push_back(entry.value);
  EXPECT_EQ(values, (Doubles{6, 5.875, 5.625, 5.375, 5.25}));
}

int64_t survivors(std::span<const double> row, const SamplingFilter& filter) {
  const Bools kept = filter_reference(row, filter);
  return std::count(kept.begin(), kept.end(), true);
}

/// The target of row s is its (s + 1)-th largest.
void expect_filtered(const SamplingFilter& filter, const std::vector<int64_t>& kept,
                     const Doubles& want) {
  SCOPED_TRACE(fmt::format("top-k {}, top-p {}", filter.top_k, filter.top_p));
  const Ints targets = {57, 55, 19, 57, 38, 36, 57, 55};
  Doubles got;
  for (int64_t s = 0; s < 8; ++s) {
    const auto at = static_cast<size_t>(s);
    EXPECT_EQ(top_ids(student().row(s), s + 1).back(), targets[at]);
    EXPECT_EQ(survivors(student().row(s), filter), kept[at]) << "row " << s;
    got.push_back(filtered_logprob_reference(student().row(s), targets[at], filter));
  }
  expect_values(got, want);
}

TEST(LogprobsReference, GoldenFilteredLogprobs) {
  expect_filtered({}, std::vector<int64_t>(8, 64),
                  {-1.748163688, -1.950016135, -2.042737857, -2.283393937, -2.462148456,
                   -2.651064173, -2.784641104, -3.095435309});
  expect_filtered({.top_k = 10}, std::vector<int64_t>(8, 10),
                  {-1.590189817, -1.790390795, -1.885388871, -2.115977590, -2.306783966,
                   -2.490977590, -2.606760206, -2.940322503});
  expect_filtered({.top_p = 0.9}, {12, 12, 13, 13, 13, 13, 13, 12},
                  {-1.644316089, -1.847203671, -1.953223396, -2.193949773, -2.374777713,
                   -2.561141136, -2.686609640, -2.992204844});
  expect_filtered({.top_k = 10, .top_p = 0.9}, std::vector<int64_t>(8, 8),
                  {-1.500657778, -1.707621019, -1.804886470, -2.033830664, -2.225416270,
                   -2.408830664, -2.512239133, -2.853717082});
  expect_filtered({.top_k = 5, .top_p = 0.5}, {2, 2, 2, 3, 3, 3, 3, 2},
                  {-0.632599035, -0.825939420, -inf, -inf, -inf, -inf, -inf, -inf});
}

TEST(LogprobsReference, GoldenDistillationFromTheTeachersTopFour) {
  const Ints ids = {29, 50, 12, 33};
  EXPECT_EQ(top_ids(teacher().row(0), 4), ids);
  Doubles logits;
  for (const int32_t id : ids) logits.push_back(teacher().row(0)[id]);
  const auto all = distillation_reference(student().row(0), ids, logits, false);
  const auto some = distillation_reference(student().row(0), ids, logits, true);
  expect_values(all.teacher, {-1.099062684, -1.349062684, -1.474062684, -1.724062684});
  expect_values(all.student, {-12.748163688, -4.498163688, -12.498163688, -4.248163688});
  expect_values(some.student, {-9.076200644, -0.826200644, -8.826200644, -0.576200644});
  EXPECT_EQ(some.teacher, all.teacher);
  EXPECT_NEAR(all.entropy, 2.643832576, nine_decimals);
}

TEST(LogprobsReference, ARamp) {
  expect_values(log_softmax_reference(ramp),
                {-4.451914396, -3.451914396, -2.451914396, -1.451914396, -0.451914396});
  EXPECT_NEAR(score_row_reference(ramp, 4).entropy, 0.999972828, nine_decimals);
  expect_values(score_gradient_reference(ramp, {}, {}, -1),
                {-0.040236628, -0.077689574, -0.125053614, -0.105809309, 0.348789125});
  EXPECT_NEAR(soft_cross_entropy_reference(ramp, Doubles{4, 3, 2, 1, 0}), 3.903855964,
              nine_decimals);
}

TEST(LogprobsReference, TopPActsOnWhatTopKLeftRenormalised) {
  EXPECT_EQ(filter_reference(ramp, {.top_p = 0.9}), (Bools{false, false, true, true, true}));
  const SamplingFilter both = {.top_k = 3, .top_p = 0.9};
  EXPECT_EQ(filter_reference(ramp, both), (Bools{false, false, false, true, true}));
  EXPECT_NEAR(filtered_logprob_reference(ramp, 3, both), -1.313261688, nine_decimals);
  EXPECT_NEAR(filtered_logprob_reference(ramp, 4, both), -0.313261688, nine_decimals);
  const SamplingFilter one = {.top_k = 2, .top_p = 0.5};
  EXPECT_EQ(filter_reference(ramp, one), (Bools{false, false, false, false, true}));
  EXPECT_EQ(filtered_logprob_reference(ramp, 4, one), 0);
}

TEST(LogprobsReference, AnIdThatNobodyOwnsScoresZeroButItsGradientCounts) {
  for (const int32_t id : {9, 5, -1, -100}) {
    EXPECT_EQ(score_row_reference(ramp, id).logprob, 0);
    expect_values(score_gradient_reference(ramp, Ints{id}, Doubles{2}, 0),
                  {-0.023312462, -0.063369842, -0.172257089, -0.468243315, -1.272817293});
    EXPECT_EQ(filtered_logprob_reference(ramp, id, {.top_k = 2}), -inf);
  }
}

TEST(LogprobsReference, GradientsOfEqualIdsAddUp) {
  expect_values(score_gradient_reference(ramp, Ints{4, 4, 7}, Doubles{1, 2, 5}, 0),
                {-0.093249848, -0.253479366, -0.689028355, -1.872973258, -2.091269172});
}

TEST(LogprobsReference, ATargetThatDidNotSurviveHasAGradientOnTheSurvivors) {
  const SamplingFilter filter = {.top_k = 2};
  EXPECT_EQ(filtered_logprob_reference(ramp, 0, filter), -inf);
  expect_values(filtered_gradient_reference(ramp, 0, filter, 1),
                {0, 0, 0, -0.268941421, -0.731058579});
}

TEST(LogprobsReference, AllTiesOfTheKthSurvive) {
  const Doubles row = {1, 2, 2, 2, 3};
  const SamplingFilter filter = {.top_k = 3};
  EXPECT_EQ(filter_reference(row, filter), (Bools{false, true, true, true, true}));
  EXPECT_NEAR(filtered_logprob_reference(row, 4, filter), -0.743668381, nine_decimals);
  EXPECT_NEAR(filtered_logprob_reference(row, 2, filter), -1.743668381, nine_decimals);
}

TEST(LogprobsReference, TiesAtTheBoundaryOfTopPGoToHigherIds) {
  const Doubles row = {0, 0, 0, 0};
  EXPECT_EQ(filter_reference(row, {.top_p = 0.5}), (Bools{false, false, true, true}));
  EXPECT_EQ(filter_reference(row, {.top_p = 0.6}), (Bools{false, true, true, true}));
}

TEST(LogprobsReference, FiltersThatDoNothingAndFiltersThatLeaveOne) {
  for (const SamplingFilter& all :
       {SamplingFilter{}, {.top_k = 5}, {.top_k = 6}, {.temperature = 3}})
    EXPECT_EQ(filter_reference(ramp, all), Bools(5, true));
  for (const SamplingFilter& one : {SamplingFilter{.top_k = 1}, {.top_p = 1e-9}, {.top_p = 0.6}})
    EXPECT_EQ(filter_reference(ramp, one), (Bools{false, false, false, false, true}));
  // The hot ramp is flatter, so that more of it is needed.
  EXPECT_EQ(survivors(ramp, {.top_p = 0.6, .temperature = 10}), 3);
  // What is -inf survives a top-k that has nothing else, with a probability of 0.
  EXPECT_EQ(filter_reference(Doubles{1, -inf, -inf}, {.top_k = 2}), Bools(3, true));
  EXPECT_EQ(filtered_logprob_reference(Doubles{1, -inf, -inf}, 0, {.top_k = 2}), 0);
}

TEST(LogprobsReference, MinusInfinityIsALogitOfProbabilityZero) {
  const Doubles row = {0, 1, -inf};
  expect_values(log_softmax_reference(row), {-1.313261688, -0.313261688, -inf});
  EXPECT_NEAR(score_row_reference(row, 0).entropy, 0.582203109, nine_decimals);
  EXPECT_EQ(score_row_reference(row, 2).logprob, -inf);
  const Doubles g = score_gradient_reference(row, Ints{2}, Doubles{1}, 1);
  EXPECT_EQ(g[2], 1);
  EXPECT_NEAR(sum(g), 0, nine_decimals);
  // A column that both mask, or the teacher alone, adds nothing; the student alone: infinite.
  EXPECT_NEAR(soft_cross_entropy_reference(row, row), 0.582203109, nine_decimals);
  EXPECT_TRUE(std::isfinite(soft_cross_entropy_reference(Doubles{0, 1, 2}, row)));
  EXPECT_EQ(soft_cross_entropy_reference(row, Doubles{0, 1, 2}), inf);
  EXPECT_EQ(soft_cross_entropy_reference(row, Doubles{0, 1, -5000}), inf);
}

TEST(LogprobsReference, LargeCommonOffsetsDoNotMatter) {
  expect_values(log_softmax_reference(Doubles{1e4, 1e4, 0}),
                {-0.693147181, -0.693147181, -10000.693147181});
  const Doubles uniform(64, -1e5);
  EXPECT_NEAR(score_row_reference(uniform, 7).logprob, -4.158883083, nine_decimals);
  EXPECT_NEAR(score_row_reference(uniform, 7).entropy, 4.158883083, nine_decimals);
}

TEST(LogprobsReference, RowsThatAreNoDistributionAreNaN) {
  for (const Doubles& row : {Doubles{1, nan, 0},
                             {nan, -inf, -inf},
                             {-inf, nan},
                             {inf, 0, 1},
                             {inf, inf},
                             {-inf, -inf}}) {
    const TokenScore score = score_row_reference(row, 0);
    EXPECT_TRUE(std::isnan(score.logprob) && std::isnan(score.entropy));
    EXPECT_TRUE(std::isnan(soft_cross_entropy_reference(row, Doubles(row.size(), 0))));
    EXPECT_TRUE(std::isnan(soft_cross_entropy_reference(Doubles(row.size(), 0), row)));
    for (const SamplingFilter& filter : {SamplingFilter{.top_k = 1}, {.top_k = 2}, {.top_p = 0.5}})
      EXPECT_TRUE(std::isnan(filtered_logprob_reference(row, 0, filter)));
  }
}

// 0.5, 0.25, 0.25 of ids 3, 2 and 1, and next to nothing of id 0.
TEST(LogprobsReference, CloseCallsHaveSeveralRightNumbersOfSurvivors) {
  const Doubles row{-50, 0, 0, std::log(2)};
  const SurvivorsReference clear(row, {.top_p = 0.6}, 1e-3), close(row, {.top_p = 0.75}, 1e-3),
      end(row, {.top_p = 0.9999}, 1e-3);
  EXPECT_EQ((Ints{static_cast<int32_t>(clear.fewest()), static_cast<int32_t>(clear.most())}),
            (Ints{2, 2}));
  EXPECT_TRUE(clear.doubtful().empty());
  EXPECT_EQ(close.fewest(), 2);
  EXPECT_EQ(close.usual(), 2);
  EXPECT_EQ(close.most(), 3);
  EXPECT_EQ(end.fewest(), 3);
  EXPECT_EQ(end.most(), 4);
  EXPECT_NEAR(close.logprob(2, 2), std::log(1.0 / 3), 1e-15);
  EXPECT_NEAR(close.logprob(2, 3), std::log(0.25), 1e-15);
  EXPECT_EQ(close.logprob(1, 2), -inf);
  // Which number a value is of: by what survives, then by the sum.
  EXPECT_EQ(close.nearest(2, std::log(0.26)), 3);
  EXPECT_EQ(close.nearest(2, std::log(0.32)), 2);
  EXPECT_EQ(close.nearest(1, -inf), 2);
  EXPECT_EQ(close.nearest(1, -7.0), 3);
  EXPECT_EQ(close.nearest(3, -inf), 2) << "none of them: the usual one";
  // A group of equal logits is in doubt as a whole.
  EXPECT_EQ(Ints(close.doubtful().begin(), close.doubtful().end()), (Ints{2, 1}));
  EXPECT_EQ(close.with_doubtful(1), 2);
  EXPECT_EQ(close.with_doubtful(2), 3);
  EXPECT_EQ(close.with_doubtful(0), 2);
}

TEST(LogprobsReference, TheLargestAreInDescendingOrderTiesByIdAndNaNFirst) {
  EXPECT_EQ(top_ids(Doubles{1, 3, 3, -inf, 2, 3}, 4), (Ints{1, 2, 5, 4}));
  EXPECT_EQ(top_ids(Doubles{1, nan, inf, nan}, 3), (Ints{1, 3, 2}));
  EXPECT_EQ(top_ids(ramp, 9), (Ints{4, 3, 2, 1, 0}));
  EXPECT_EQ(top_ids(ramp, 0), Ints{});
}

// Any row.

/// Logits on a grid of eighths, so that ties occur; up to 20.
Doubles any_row() {
  Doubles row;
  for (const int z : *rc::gen::container<std::vector<int>>(rc::gen::inRange(-40, 40)))
    if (row.size() < 20) row.push_back(z / 8.0);
  row.push_back(*rc::gen::inRange(-40, 40) / 8.0);
  return row;
}
double any_gradient() {
  return *rc::gen::inRange(-16, 17) / 8.0;
}
double any_temperature() {
  return *rc::gen::inRange(2, 17) / 8.0;
}
Ints any_ids(size_t count, size_t vocab_size, bool owned) {
  const int margin = owned ? 0 : 2;
  Ints ids;
  for (size_t k = 0; k < count; ++k)
    ids.push_back(*rc::gen::inRange(-margin, static_cast<int>(vocab_size) + margin));
  return ids;
}

/// Central differences of f, against its gradient. With steps of eps^(1/3), what they leave out and
/// what rounding adds are both about eps^(2/3) of the size of f and its third derivatives.
void assert_gradient(const Doubles& row, const Doubles& gradient,
                     const std::function<double(const Doubles&)>& f) {
  const double step = std::cbrt(std::numeric_limits<double>::epsilon());
  const double tolerance = 100 * step * step * (1 + std::abs(f(row)));
  for (size_t v = 0; v < row.size(); ++v) {
    if (row[v] == -inf) {
      RC_ASSERT(gradient[v] == 0);
      continue;
    }
    Doubles low = row, high = row;
    low[v] -= step, high[v] += step;
    const double slope = (f(high) - f(low)) / (high[v] - low[v]);
    RC_LOG() << "column " << v << ": " << gradient[v] << ", by differences " << slope << "\n";
    RC_ASSERT(std::abs(slope - gradient[v]) <= tolerance);
  }
}

TEST(LogprobsReference, ScoreGradientsAreDifferencesOfTheScores) {
  EXPECT_TRUE(rc::check("log-probabilities of several ids, and the entropy", [] {
    const Doubles row = any_row();
    const Ints ids = any_ids(3, row.size(), true);
    const Doubles g = {any_gradient(), any_gradient(), any_gradient()};
    const double h = any_gradient(), temperature = any_temperature();
    assert_gradient(row, score_gradient_reference(row, ids, g, h, temperature),
                    [&](const Doubles& z) {
                      double loss = h * score_row_reference(z, -1, temperature).entropy;
                      for (size_t k = 0; k < ids.size(); ++k)
                        loss += g[k] * score_row_reference(z, ids[k], temperature).logprob;
                      return loss;
                    });
  }));
}

TEST(LogprobsReference, SoftCrossEntropyGradientsAreDifferences) {
  EXPECT_TRUE(rc::check("by the student's logits", [] {
    const Doubles student = any_row();
    Doubles teacher = any_row();
    teacher.resize(student.size(), 1);
    const double g = any_gradient();
    assert_gradient(student, soft_cross_entropy_gradient_reference(student, teacher, g),
                    [&](const Doubles& z) { return g * soft_cross_entropy_reference(z, teacher); });
  }));
}

TEST(LogprobsReference, DistillationGradientsAreDifferences) {
  EXPECT_TRUE(rc::check("of student and entropy, ids repeated", [] {
    const Doubles row = any_row();
    const auto picks = *rc::gen::inRange<size_t>(1, 6);
    const Ints ids = any_ids(picks, row.size(), true);
    Doubles g;
    for (size_t k = 0; k < picks; ++k) g.push_back(any_gradient());
    const bool renormalise = *rc::gen::arbitrary<bool>();
    const double h = renormalise ? 0 : any_gradient();
    assert_gradient(
        row, distillation_gradient_reference(row, ids, g, h, renormalise), [&](const Doubles& z) {
          const auto d = distillation_reference(z, ids, g, renormalise);
          return h * d.entropy + std::inner_product(g.begin(), g.end(), d.student.begin(), 0.0);
        });
  }));
}

/// Σ q (log q - log p) over the whole vocabulary.
double divergence(const Doubles& student, const Doubles& teacher) {
  const double h = score_row_reference(student, -1).entropy;
  return soft_cross_entropy_reference(teacher, student) - h;
}

TEST(LogprobsReference, DivergencesWithASampledTailAreRightOnAverageOverTargets) {
  EXPECT_TRUE(rc::check("value, unbiased gradient, and what the advantage lacks", [] {
    const Doubles student = any_row();
    Doubles teacher = any_row();
    teacher.resize(student.size(), 1);
    const auto k = *rc::gen::inRange<int64_t>(1, std::ssize(student) + 3);
    const double g = any_gradient();
    const Doubles log_q = log_softmax_reference(student);
    double value = 0;
    Doubles gradient(student.size(), 0);
    for (size_t target = 0; target < student.size(); ++target) {
      const auto one = top_k_divergence_reference(student, k, teacher, target, true);
      const auto other = top_k_divergence_reference(student, k, teacher, target, false);
      const Doubles slope = top_k_divergence_gradient_reference(student, one, g),
                    lacks = top_k_divergence_gradient_reference(student, other, g);
      const bool is_tail = std::cmp_greater(one.ids.size(), std::min(k, std::ssize(student)));
      RC_ASSERT(one.value == other.value);
      for (size_t v = 0; v < slope.size(); ++v) {
        const double constant = g * ((v == target ? 1 : 0) - std::exp(log_q[v]));
        RC_ASSERT(std::abs(slope[v] - lacks[v] - (is_tail ? constant : 0)) <
                  1e-9 * (1 + std::abs(slope[v])));
        gradient[v] += std::exp(log_q[target]) * slope[v];
      }
      value += std::exp(log_q[target]) * one.value;
    }
    RC_ASSERT(std::abs(value - divergence(student, teacher)) < 1e-9 * (1 + std::abs(value)));
    assert_gradient(student, gradient,
                    [&](const Doubles& z) { return g * divergence(z, teacher); });
  }));
}

TEST(LogprobsReference, DivergencesOfExcludedIdsAreSelected) {
  const Doubles student = {0, 0, -inf, -inf}, even(4, 0), teacher = {0, -inf, 0, -inf};
  const auto of = [&](const Doubles& p, int64_t k, int64_t target) {
    return top_k_divergence_reference(student, k, p, target, true);
  };
  EXPECT_NEAR(of(even, 3, 1).value, std::log(2), 1e-12);  // the third has no part
  EXPECT_NEAR(of(even, 3, -1).value, std::log(2), 1e-12);
  EXPECT_NEAR(of(even, 1, 4).value, std::log(2) / 2, 1e-12);
  EXPECT_EQ(of(even, 2, 3).value, -inf);
  EXPECT_EQ(of(teacher, 2, 0).value, inf);
  EXPECT_EQ(of(teacher, 1, 1).value, inf);
  EXPECT_EQ(of(teacher, 1, 3).value, -inf);
  EXPECT_TRUE(std::isnan(of(teacher, 2, 3).value));
  EXPECT_EQ(top_k_divergence_gradient_reference(student, of(even, 4, 0), 1)[3], 0);
  EXPECT_TRUE(std::isnan(top_k_divergence_gradient_reference(student, of(even, 2, 3), 1)[0]));
  EXPECT_EQ(top_k_divergence_gradient_reference(student, of(even, 2, 3), 0)[0], 0);
}

TEST(LogprobsReference, FilteredGradientsAreDifferencesWhereTheTargetSurvives) {
  EXPECT_TRUE(rc::check("ties kept together, target kept", [] {
    const Doubles row = any_row();
    const SamplingFilter filter = {*rc::gen::inRange<int64_t>(0, 8), *rc::gen::inRange(1, 9) / 8.0,
                                   any_temperature()};
    const Bools kept = filter_reference(row, filter);
    const int32_t target = top_k_reference(row, 1)[0].id;
    const double g = any_gradient();
    const Doubles gradient = filtered_gradient_reference(row, target, filter, g);
    if (!kept[target]) {  // a lower id of equal logit
      RC_ASSERT(filtered_logprob_reference(row, target, filter) == -inf);
      return;
    }
    // What survives stays: the others are taken away first.
    Doubles left = row;
    for (size_t v = 0; v < row.size(); ++v)
      if (!kept[v]) left[v] = -inf;
    assert_gradient(left, gradient, [&](const Doubles& z) {
      return g * score_row_reference(z, target, filter.temperature).logprob;
    });
  }));
}

TEST(LogprobsReference, DistributionsSumToOneAndEntropiesLieBetweenZeroAndTheUniformOne) {
  EXPECT_TRUE(rc::check("any row and temperature", [] {
    const Doubles row = any_row();
    const double temperature = any_temperature();
    double mass = 0;
    for (const double x : log_softmax_reference(row, temperature)) mass += std::exp(x);
    RC_ASSERT(std::abs(mass - 1) < nine_decimals);
    const double entropy = score_row_reference(row, 0, temperature).entropy;
    RC_ASSERT(entropy > -nine_decimals);
    RC_ASSERT(entropy < std::log(static_cast<double>(row.size())) + nine_decimals);
  }));
}

TEST(LogprobsReference, SurvivorsAreTheFewestWithEnoughProbability) {
  EXPECT_TRUE(rc::check("any filter", [] {
    const Doubles row = any_row();
    const SamplingFilter filter = {*rc::gen::inRange<int64_t>(0, 8), *rc::gen::inRange(1, 9) / 8.0,
                                   any_temperature()};
    const Bools kept = filter_reference(row, filter);
    const Bools by_k = filter_reference(row, {.top_k = filter.top_k});
    Doubles left = row;
    for (size_t v = 0; v < row.size(); ++v) {
      if (!by_k[v]) left[v] = -inf;
      RC_ASSERT(by_k[v] || !kept[v]);
      // Nothing larger is dropped, nor an equal one of a higher id.
      for (size_t w = 0; w < row.size(); ++w)
        if (kept[v] && (row[w] > row[v] || (row[w] == row[v] && w > v))) RC_ASSERT(kept[w]);
    }
    const Doubles logprobs = log_softmax_reference(left, filter.temperature);
    double mass = 0, least = 1;
    for (size_t v = 0; v < row.size(); ++v) {
      if (!kept[v]) continue;
      mass += std::exp(logprobs[v]);
      least = std::min(least, std::exp(logprobs[v]));
    }
    RC_ASSERT(mass > filter.top_p - nine_decimals);
    if (filter.top_p < 1) RC_ASSERT(mass - least < filter.top_p + nine_decimals);
  }));
}

TEST(LogprobsReference, IdsThatRepeatCountTwiceWhenRenormalised) {
  const auto d = distillation_reference(ramp, Ints{4, 4, 3}, Doubles{1, 1, 1}, true);
  const double log_sum = std::log(2 + std::exp(-1));
  expect_values(d.student, {-log_sum, -log_sum, -1 - log_sum});
  expect_values(d.teacher, Doubles(3, -std::log(3.0)));
}

}  // namespace GYRE_FILE
}  // namespace gyre
