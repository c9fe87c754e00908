#include <cmath>
#include <functional>
#include <limits>

#include "attention/tolerance.hpp"
#include "core/error.hpp"
#include "core/tolerance.hpp"
#include "model/tolerance.hpp"
#include "mpi_test.hpp"
#include "report/verify.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

std::string somewhere() {
  return "somewhere";
}

TEST(ErrorBetween, MeasuresInUnitsOfTheScale) {
  EXPECT_DOUBLE_EQ(error_between(1.5, 1), 0.5);
  EXPECT_DOUBLE_EQ(error_between(1, 1.5, 0.25), 2);
  EXPECT_EQ(error_between(0, 0, 0), 0);
}

TEST(ErrorBetween, WhatIsNotFiniteIsInfinitelyWrongUnlessTheDefinitionHasIt) {
  EXPECT_EQ(error_between(-infinity, -infinity, 1, -infinity), 0);
  EXPECT_EQ(error_between(-infinity, -infinity), infinity) << "not by the definition";
  EXPECT_EQ(error_between(infinity, infinity, 1, -infinity), infinity);
  EXPECT_EQ(error_between(nan, nan, 1, nan), infinity);
  EXPECT_EQ(error_between(1, 2, infinity), infinity);
  EXPECT_EQ(error_between(nan, 1), infinity);
  EXPECT_EQ(error_between(1, nan), infinity);
  EXPECT_EQ(error_between(nan, nan), infinity);
  EXPECT_EQ(error_between(infinity, 1), infinity);
  EXPECT_EQ(error_between(-infinity, infinity), infinity);
  EXPECT_EQ(error_between(1, 2, 0), infinity);
  EXPECT_EQ(error_between(1, 2, nan), infinity);
}

TEST(Verification, SaysHowMuchOfTheToleranceWasUsed) {
  Verification good, scaled, sampled, nothing(4);
  good.check("hidden", 0.5).add(1.25, 1, somewhere);
  good.check("logprobs", 1).add(2, 2, somewhere);
  EXPECT_TRUE(good.passed());
  EXPECT_EQ(good.text(), "VERIFY PASSED 2/2 max_err_over_tol=0.5\n");
  // Errors and tolerances are printed without the scale.
  scaled.check("logprob", 0.125).add(-5.5, -6.5, somewhere, 4);
  EXPECT_EQ(scaled.text(),
            "VERIFY FAILED 0/1 max_err_over_tol=2\n"
            "VERIFY   logprob: 1 of 1 values outside\n"
            "VERIFY     somewhere: got -5.5, expected -6.5, error 1, tolerance 0.5\n");
  Verification answered;
  answered.check("logprob", 0.5).add(3, 1, somewhere, 1, 0, Against::answer);
  answered.check("ids", 0.5).add(3, 1, somewhere, 1, 0, Against::answer_definition);
  EXPECT_EQ(answered.text(),
            "VERIFY FAILED 0/2 max_err_over_tol=4\n"
            "VERIFY   logprob: 1 of 1 values outside\n"
            "VERIFY     somewhere: yours 1, Gyre's 3, error 2, tolerance 0.5\n"
            "VERIFY   ids: 1 of 1 values outside\n"
            "VERIFY     somewhere: yours 3, Gyre's 1, error 2, tolerance 0.5\n");
  sampled.check("out", 1).add(1, 1, somewhere);
  sampled.check("out", 1).add_sample(64, 4096);
  sampled.check("d_q", 1).add(1, 1, somewhere);
  sampled.check("d_q", 1).add_sample(128, 4096);
  EXPECT_EQ(sampled.text(), "VERIFY PASSED 2/2 max_err_over_tol=0, sampled 64 of 4096 tokens\n");
  EXPECT_FALSE(nothing.passed());
  EXPECT_EQ(nothing.text(), "VERIFY SKIPPED\n");
  nothing.check("hidden", 0.125);
  EXPECT_FALSE(nothing.passed());
  EXPECT_EQ(nothing.text(),
            "VERIFY FAILED 0/1 max_err_over_tol=0\nVERIFY   hidden: nothing was compared\n");
  nothing.check("hidden", 0.125).add(1.5, 1, somewhere);
  EXPECT_TRUE(nothing.passed());
  EXPECT_EQ(nothing.checks()[0].tolerance(), 0.5) << "multiplied by 4";
}

TEST(Verification, FailsAndNamesTheWorstPlace) {
  Verification checks;
  Check& check = checks.check("hidden", 0.5);
  int asked = 0;
  for (int i = 0; i < 8; ++i)
    check.add(i == 5   ? 3
              : i == 6 ? 2
                       : 1,
              1, [&] {
                ++asked;
                return "position " + std::to_string(i);
              });
  checks.check("entropy", 1).add(0, 0, somewhere);
  EXPECT_EQ(asked, 3) << "two values outside, and the largest error";
  EXPECT_FALSE(checks.passed());
  const std::string first =
      "VERIFY FAILED 1/2 max_err_over_tol=4\n"
      "VERIFY   hidden: 2 of 8 values outside\n"
      "VERIFY     position 5: got 3, expected 1, error 2, tolerance 0.5\n";
  EXPECT_EQ(checks.text(), first);
  EXPECT_EQ(checks.text(10),
            first + "VERIFY     position 6: got 2, expected 1, error 1, tolerance 0.5\n");
}

TEST(Verification, MergingKeepsTheTenWorstInOrderWhoeverFoundThem) {
  Verification a, b;
  const auto place = [](int i) { return [i] { return "position " + std::to_string(i); }; };
  for (int i = 0; i < 12; ++i)
    (i % 2 == 0 ? a : b).check("x", 1).add(10 + (i * 7) % 12, 1, place(i));
  b.check("entropy", 1).add(0, 0, somewhere);
  a.merge(b);
  ASSERT_EQ(a.checks().size(), 2U);
  const Check& check = a.checks()[0];
  ASSERT_EQ(check.deviations().size(), Check::max_deviations);
  for (size_t i = 0; i < check.deviations().size(); ++i)
    EXPECT_EQ(check.deviations()[i].got, 21.0 - static_cast<double>(i));
  EXPECT_EQ(check.where(), "position 5");
  EXPECT_EQ(check.count(), 12);
  EXPECT_EQ(check.outside(), 12);
}

TEST(Verification, ASecondLookAtTheSameValuesCountsThemOnce) {
  Verification first, second;
  first.check("x", 1).add(3, 1, [] { return "first"; });
  second.check("x", 1).add(4, 1, [] { return "second"; });
  first.check("x", 1).add_sample(1, 8);
  second.check("x", 1).add_sample(1, 8);
  Verification all = first;
  all.merge_repeat(second);
  all.merge_repeat(first);
  EXPECT_EQ(all.checks()[0].count(), 1);
  EXPECT_EQ(all.checks()[0].outside(), 1);
  EXPECT_EQ(all.checks()[0].sampled_of(), 8);
  EXPECT_EQ(all.checks()[0].deviations().at(0).where, "second");
}

TEST(Verification, NanAndWhatCannotBeComparedFail) {
  Verification checks;
  Check& check = checks.check("logprobs", 1e30);
  check.add(nan, 1, [] { return "document 2"; });
  check.add(1e35, 1, somewhere);
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(check.max_error(), infinity);
  EXPECT_EQ(check.where(), "document 2");
  Check shapes("shapes", 1), lse("lse", 1), no_lse("lse", 1), ids("ids", 0);
  shapes.add_failure("dataset hidden");
  EXPECT_FALSE(shapes.passed());
  EXPECT_EQ(shapes.where(), "dataset hidden");
  lse.add(-infinity, -infinity, somewhere, 1, -infinity);
  no_lse.add(-infinity, -infinity, somewhere, 1, 0);
  EXPECT_TRUE(lse.passed() && !no_lse.passed()) << "where the definition has it";
  EXPECT_FALSE(ids.passed());
  ids.add_nothing();
  EXPECT_TRUE(ids.passed());
}

TEST(Verification, AToleranceAboveTheValuesFails) {
  const auto passes = [](double tolerance, std::initializer_list<double> references) {
    Verification checks;
    for (const double x : references) checks.check("x", tolerance).add(x, x, somewhere, 2);
    return checks.passed();
  };
  EXPECT_TRUE(passes(1, {0, 0})) << "the size that errors are relative to";
  EXPECT_TRUE(passes(3, {2, -10})) << "3 times the scale, as the values are on average";
  EXPECT_FALSE(passes(3.1, {2, -10}));
  EXPECT_FALSE(passes(1.1, {0, 0}));
  EXPECT_FALSE(passes(infinity, {1}));
  EXPECT_FALSE(passes(nan, {1}));
  Verification checks;
  checks.check("x", infinity).add(nan, 1, somewhere);
  EXPECT_EQ(checks.text(),
            "VERIFY FAILED 0/1 max_err_over_tol=inf\n"
            "VERIFY   x: a tolerance of inf is larger than the values: nothing was verified\n");
}

TEST(Verification, WhatF32CannotHoldIsInfinite) {
  const double beyond = -4.86e38, below = -3.3e38;
  const auto passes = [](double got, double expected) {
    Verification checks;
    checks.check("logprob", 1e-5).add(got, expected, somewhere, std::abs(expected) / 4);
    return checks.passed();
  };
  EXPECT_TRUE(passes(-infinity, beyond));
  EXPECT_TRUE(passes(-infinity, -3.40282e38)) << "an error of the tolerance takes it there";
  EXPECT_TRUE(passes(beyond, beyond));
  EXPECT_FALSE(passes(infinity, beyond));
  EXPECT_FALSE(passes(-infinity, below));
  EXPECT_FALSE(passes(-3.4e38, beyond));
  EXPECT_FALSE(passes(nan, beyond));
}

TEST(Verification, CountsUndefinedValues) {
  Verification checks, other;
  checks.check("topk_kl", 1).add(1, 1, somewhere);
  checks.check("topk_kl", 1).add_undefined();
  other.check("topk_kl", 1).add_undefined();
  other.check("kept", 1).add_undefined();
  EXPECT_EQ(other.text(), "VERIFY PASSED 2/2 max_err_over_tol=0, 2 values undefined (NaN)\n");
  checks.merge(other);
  EXPECT_EQ(checks.text(), "VERIFY PASSED 2/2 max_err_over_tol=0, 3 values undefined (NaN)\n");
}

/// 10000 pairs of references about 2, and what `change` makes of them and of errors of one sigma.
std::string text_of_errors(double sigma, const std::function<double(double, double)>& change) {
  Verification checks(1), more(1);
  for (int i = 0; i < 10000; ++i) {
    const double want = 1 + 2.0 * ((i * 7919) % 1000) / 1000;
    const double error = sigma * ((i * 104729) % 2001 - 1000) / 577;  // uniform
    (i % 2 == 0 ? checks : more).check("out", 1, sigma).add(change(want, error), want, somewhere);
  }
  checks.merge(more);
  const std::string all = checks.text();
  return checks.passed() ? "" : all.substr(all.find("out: ") + 5);
}

TEST(Verification, FindsWhatErrorsHaveInCommon) {
  constexpr double sigma = 0.004;
  EXPECT_EQ(text_of_errors(sigma, std::plus()), "");
  EXPECT_EQ(text_of_errors(0, [](double want, double) { return 1.01 * want; }), "");
  const auto begins = [&](const std::function<double(double, double)>& change) {
    const std::string text = text_of_errors(sigma, change);
    return text.substr(0, text.find(" all "));
  };
  EXPECT_EQ(begins([](double want, double error) { return want + 2.1 * error; }), "the rms of");
  EXPECT_EQ(begins([](double want, double error) { return 1.004 * want + error; }),
            "the factor of");
  EXPECT_EQ(text_of_errors(sigma, [](double want, double) { return 1.01 * want; }),
            "the factor of all values is 1.01, more than 0.000654 from 1\n");
}

TEST(Verification, AnOffsetOfAllValuesFails) {
  Verification checks;
  for (int i = 0; i < 10000; ++i) {
    const double want = i % 2 == 0 ? 1 : -1;
    checks.check("logprob", 1, 0.01).add(want - 0.005, want, somewhere);
  }
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(checks.checks()[0].fault(),
            "the mean of all errors is -0.005, more than 0.0034 from 0");
}

TEST(Verification, AFactorThatAllValuesHaveIsNamed) {
  const auto text = [](const std::vector<double>& got, const std::vector<double>& expected) {
    Verification checks;
    for (size_t i = 0; i < got.size(); ++i)
      checks.check("d_q", 1e-3).add(got[i], expected[i], somewhere);
    const std::string all = checks.text();
    const size_t begin = all.find("outside") + 7;
    return all.substr(begin, all.find('\n', begin) - begin);
  };
  const std::vector<double> right{1, -2, 0, 1e-4};
  EXPECT_EQ(text({2, -4.001, 0.0005, 2e-4}, right), ", differs by a factor 2: gather convention?");
  EXPECT_EQ(text({0.25, -0.5, 0, 0}, right), ", differs by a factor 1/4: gather convention?");
  EXPECT_EQ(text({2, -4.1, 0, 2e-4}, right), "") << "one value has another";
  EXPECT_EQ(text({2, -4, 0.1, 2e-4}, right), "");
  EXPECT_EQ(text({2, -4, nan, 2e-4}, right), "");
  EXPECT_EQ(text({-2, 4, 0, -2e-4}, right), "");
  EXPECT_EQ(text({1.5, -3, 0, 1.5e-4}, right), "") << "no whole one";
  EXPECT_EQ(text({2}, {1}), "") << "of one value, any is";
}

TEST(Verification, ZeroToleranceAsksForEquality) {
  Verification checks;
  Check& check = checks.check("token ids", 0);
  check.add(7, 7, somewhere);
  EXPECT_TRUE(checks.passed());
  EXPECT_EQ(checks.max_error_over_tolerance(), 0);
  check.add(8, 7, somewhere);
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(checks.max_error_over_tolerance(), infinity);
}

TEST(Verification, OneNameHasOneTolerance) {
  Verification checks;
  Check& first = checks.check("hidden", 1);
  for (int i = 0; i < 100; ++i) checks.check("other " + std::to_string(i), 1);
  EXPECT_EQ(&checks.check("hidden", 1), &first);
  EXPECT_THROW(checks.check("hidden", 2), Error);
}

DecoderShape shape_of_layers(int64_t layers) {
  return {.layers = layers,
          .hidden = 256,
          .head_dim = 32,
          .attention_width = 256,
          .intermediate = 688,
          .vocab = 256,
          .longest_document = 4096,
          .merges = 8};
}

TEST(Tolerance, GrowsAsTheSquareRootOfTheRoundings) {
  EXPECT_DOUBLE_EQ(tolerance_for(DType::f32, 400), 2 * tolerance_for(DType::f32, 100));
  EXPECT_DOUBLE_EQ(tolerance_for(DType::f32, 36), tolerance_safety * epsilon_of(DType::f32));
  EXPECT_EQ(tolerance_for(DType::i64, 100), 0);
  EXPECT_DOUBLE_EQ(hidden_tolerance(shape_of_layers(8)), 2 * hidden_tolerance(shape_of_layers(2)));
}

TEST(Tolerance, FollowsEveryLength) {
  EXPECT_LT(attention_tolerance(64, 1024, 0), attention_tolerance(128, 1024, 0));
  EXPECT_LT(attention_tolerance(64, 1024, 0), attention_tolerance(64, 2048, 0));
  EXPECT_LT(attention_tolerance(64, 1024, 0), attention_tolerance(64, 1024, 8));
  for (int64_t DecoderShape::*length :
       {&DecoderShape::layers, &DecoderShape::hidden, &DecoderShape::head_dim,
        &DecoderShape::attention_width, &DecoderShape::intermediate,
        &DecoderShape::longest_document, &DecoderShape::merges}) {
    DecoderShape longer = shape_of_layers(4);
    longer.*length *= 2;
    EXPECT_LT(hidden_tolerance(shape_of_layers(4)), hidden_tolerance(longer));
    EXPECT_LT(score_tolerance(shape_of_layers(4), 10), score_tolerance(longer, 10));
  }
}

TEST(Tolerance, OfTheKindOfLayerThatHasMoreRoundings) {
  DecoderShape hybrid = shape_of_layers(4);
  hybrid.recurrence = 1;
  EXPECT_EQ(hidden_tolerance(shape_of_layers(4)), hidden_tolerance(hybrid));
  hybrid.recurrence = 1 << 20;
  EXPECT_LT(hidden_tolerance(shape_of_layers(4)), hidden_tolerance(hybrid));
}

TEST(Tolerance, AnOutputGateRounds) {
  for (const DType type : {DType::f32, DType::bf16}) {
    DecoderShape gated = shape_of_layers(4), plain = gated;
    gated.output_gate = true;
    gated.activations = plain.activations = type;
    EXPECT_LT(hidden_tolerance(plain), hidden_tolerance(gated));
  }
}

TEST(Tolerance, ChangesAreMeasuredWhereTheShapeDoesNotTell) {
  DecoderShape shape = shape_of_layers(4);
  EXPECT_EQ(perturbation_of(shape).passes, 0);
  EXPECT_EQ(tolerance_over_change(shape), 0);
  shape.recurrence = 1;
  // A relative error of every norm as large as the perturbation would change values as that does.
  EXPECT_GT(perturbation_of(shape).passes, 1);
  EXPECT_DOUBLE_EQ(tolerance_over_change(shape) * perturbation_of(shape).deviation,
                   tolerance_for(DType::f32, roundings_per_layer(shape)));
  shape.activations = DType::bf16;
  EXPECT_EQ(tolerance_over_change(shape), narrow_safety);
  EXPECT_DOUBLE_EQ(perturbation_of(shape).deviation, 0x1p-9 / std::sqrt(3.0));
  shape.recurrence = 0;
  EXPECT_EQ(perturbation_of(shape).passes, 1);
  EXPECT_EQ(tolerance_over_change(shape), 0);
}

TEST(Tolerance, OfScoresFollowsTheLogits) {
  const DecoderShape shape = shape_of_layers(4);
  EXPECT_DOUBLE_EQ(score_tolerance(shape, 40), 2 * score_tolerance(shape, 20));
  EXPECT_EQ(score_tolerance(shape, 0), score_tolerance(shape, 1));  // small logits count as 1
}

TEST(Tolerance, IsFarBelowAnIndexingMistake) {
  // One key too many among the 4096 of the longest document moves its share of the output: about
  // 1/sqrt(keys) of the row's rms when all keys weigh the same.
  EXPECT_LT(10 * hidden_tolerance(shape_of_layers(4)), 1 / std::sqrt(4096.0));
}

TEST(Check, ArraysAreComparedByElementAndLength) {
  Check check("ids", 0);
  check.add_all(std::vector<int>{1, 2, 3}, {1, 2, 3}, "a");
  EXPECT_TRUE(check.passed());
  EXPECT_EQ(check.count(), 3);
  check.add_all(std::vector<int>{1, 5}, {1, 2}, "b");
  EXPECT_FALSE(check.passed());
  EXPECT_EQ(check.where(), "b[1]");
  check.add_all(std::vector<int>{1}, {1, 2}, "c");
  EXPECT_EQ(check.outside(), 2);
  EXPECT_EQ(check.where(), "c: 1 elements, not 2");
}

}  // namespace GYRE_FILE
}  // namespace gyre
