#include <limits>

#include "core/error.hpp"
#include "mpi_test.hpp"
#include "report/tolerance.hpp"
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

TEST(ErrorBetween, WhatIsNotFiniteIsInfinitelyWrongUnlessEqual) {
  EXPECT_EQ(error_between(-infinity, -infinity), 0);
  EXPECT_EQ(error_between(nan, 1), infinity);
  EXPECT_EQ(error_between(1, nan), infinity);
  EXPECT_EQ(error_between(nan, nan), infinity);
  EXPECT_EQ(error_between(infinity, 1), infinity);
  EXPECT_EQ(error_between(-infinity, infinity), infinity);
  EXPECT_EQ(error_between(1, 2, 0), infinity);
  EXPECT_EQ(error_between(1, 2, nan), infinity);
}

TEST(Verification, DigestIsOfTheBitsOfAllValuesInOrder) {
  const auto digest = [](std::initializer_list<double> values) {
    Check check("x", 1);
    for (const double value : values) check.add(value, 0, [] { return ""; });
    return check.digest();
  };
  EXPECT_EQ(digest({1, 2}), digest({1, 2}));
  EXPECT_NE(digest({1, 2}), digest({2, 1}));
  EXPECT_NE(digest({1, 2}), digest({1, std::nextafter(2.0, 3.0)}));
  EXPECT_NE(digest({0.0}), digest({-0.0}));
  Check other("x", 1);
  other.add(1, 0.5, [] { return ""; });
  EXPECT_NE(digest({1}), other.digest());
}

TEST(Verification, PassesWithinTheToleranceAndSaysHowMuchOfItWasUsed) {
  Verification checks;
  checks.check("hidden", 0.5).add(1.25, 1, somewhere);
  checks.check("logprobs", 1).add(2, 2, somewhere);
  EXPECT_TRUE(checks.passed());
  EXPECT_EQ(checks.text(), "VERIFY PASSED 2/2 max_err_over_tol=0.5\n");
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
  EXPECT_EQ(asked, 1);
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(
      checks.text(),
      "VERIFY FAILED 1/2 max_err_over_tol=4\n"
      "VERIFY   hidden: 2 of 8 values outside; worst error 2, tolerance 0.5, at position 5\n");
}

TEST(Verification, NanNeverPasses) {
  Verification checks;
  Check& check = checks.check("logprobs", 1e30);
  check.add(nan, 1, [] { return "document 2"; });
  check.add(1e35, 1, somewhere);
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(check.max_error(), infinity);
  EXPECT_EQ(check.where(), "document 2");
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

TEST(Verification, WhatCannotBeComparedFails) {
  Verification checks;
  checks.check("shapes", 1).add_failure("dataset hidden");
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(checks.checks()[0].where(), "dataset hidden");
}

TEST(Verification, ComparingNothingIsNotPassing) {
  Verification checks;
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(checks.text(), "VERIFY SKIPPED\n");
  checks.check("hidden", 1);
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(checks.text(),
            "VERIFY FAILED 0/1 max_err_over_tol=0\nVERIFY   hidden: nothing was compared\n");
}

TEST(Verification, ScaleMultipliesEveryTolerance) {
  Verification checks(4);
  checks.check("hidden", 0.5).add(2.5, 1, somewhere);
  EXPECT_TRUE(checks.passed());
  EXPECT_EQ(checks.checks()[0].tolerance(), 2);
}

TEST(Verification, OneNameHasOneTolerance) {
  Verification checks;
  Check& first = checks.check("hidden", 1);
  for (int i = 0; i < 100; ++i) checks.check("other " + std::to_string(i), 1);
  EXPECT_EQ(&checks.check("hidden", 1), &first);
  EXPECT_THROW(checks.check("hidden", 2), Error);
}

TEST(Verification, MergingKeepsTheWorst) {
  Verification a, b;
  a.check("hidden", 1).add(1.5, 1, [] { return "a"; });
  b.check("hidden", 1).add(1.75, 1, [] { return "b"; });
  b.check("entropy", 1).add(0, 0, somewhere);
  a.merge(b);
  EXPECT_EQ(a.checks().size(), 2U);
  EXPECT_EQ(a.checks()[0].where(), "b");
  EXPECT_EQ(a.checks()[0].count(), 2);
  EXPECT_TRUE(a.passed());
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

TEST(Check, NothingToCompareHolds) {
  Check check("ids", 0);
  EXPECT_FALSE(check.passed());
  check.add_nothing();
  EXPECT_TRUE(check.passed());
}

}  // namespace GYRE_FILE
}  // namespace gyre
