// Inputs that do not depend on who makes them, and look like normal variables.

#include "core/token_random.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace gyre {
namespace GYRE_FILE {

std::vector<float> row_of(const TokenRandom& random, int64_t token, int64_t width) {
  std::vector<float> row(width);
  fill_token_row(random, token, row);
  return row;
}

TEST(SplitMix64, GivesThePublishedStream) {
  // The first outputs for seed 1234567, as Rosetta Code lists them ("Pseudo-random numbers/
  // Splitmix64").
  const std::vector<uint64_t> expected = {6457827717110365317U, 3203168211198807973U,
                                          9817491932198370423U, 4593380528125082431U,
                                          16408922859458223821U};
  uint64_t state = 1234567;
  for (const uint64_t value : expected)
    EXPECT_EQ(splitmix64_mix(state += splitmix64_golden), value);
}

TEST(TokenRandom, ValuesAreFixedForEver) {
  // Computed by hand from the formulas of the header, in Python's integers.
  const std::vector<float> expected = {-1.92701745F, -1.13977695F, -1.04978621F, -1.69832742F,
                                       -0.429709077F};
  EXPECT_EQ(row_of({42, TokenTensor::v}, 7, std::ssize(expected)), expected);
}

TEST(TokenRandom, ARowDependsOnSeedTensorAndTokenOnly) {
  EXPECT_TRUE(rc::check("rows filled together, in any order, width and type", [] {
    const auto seed = *rc::gen::arbitrary<uint64_t>();
    const TokenRandom random{seed, *rc::gen::element(TokenTensor::k, TokenTensor::d_out)};
    const auto tokens = *rc::gen::container<std::vector<int64_t>>(
        rc::gen::weightedOneOf<int64_t>({{1, rc::gen::inRange<int64_t>(-9, 0)},
                                         {2, rc::gen::inRange<int64_t>(0, int64_t{1} << 40)}}));
    const int64_t cols = *rc::gen::inRange<int64_t>(0, 9), stride = cols + 3;
    const auto first = *rc::gen::inRange<int64_t>(0, 9);
    constexpr float untouched = 1e30F;
    std::vector<float> storage(tokens.size() * static_cast<size_t>(stride), untouched);
    fill_token_rows(random, tokens,
                    MatrixView<float>(storage.data(), std::ssize(tokens), cols, stride), first);
    for (size_t r = 0; r < tokens.size(); ++r) {
      const std::vector<float> alone = row_of(random, tokens[r], 20);
      for (int64_t c = 0; c < stride; ++c)
        RC_ASSERT(storage[r * static_cast<size_t>(stride) + static_cast<size_t>(c)] ==
                  (tokens[r] < 0 || c >= cols ? untouched : alone[first + c]));
    }
  }));
}

TEST(TokenRandom, Bf16RowsHoldTheRoundedValues) {
  const std::vector<int64_t> tokens = {5, 1000000};
  std::vector<bf16> narrow(2 * 64);
  fill_token_rows({3, TokenTensor::q}, tokens, MatrixView<bf16>(narrow.data(), 2, 64));
  for (size_t r = 0; r < tokens.size(); ++r) {
    const std::vector<float> exact = row_of({3, TokenTensor::q}, tokens[r], 64);
    const std::vector<float> rounded = row_of({3, TokenTensor::q, true}, tokens[r], 64);
    for (size_t c = 0; c < 64; ++c) {
      EXPECT_EQ(to_float(narrow[r * 64 + c]), rounded[c]);
      EXPECT_EQ(to_float(to_bf16(exact[c])), rounded[c]);
    }
    EXPECT_NE(exact, rounded);
  }
}

/// Mean of f over values; the standard deviation of that mean is about spread / sqrt(values).
template <class F>
double mean_of(const std::vector<float>& values, F f) {
  double sum = 0;
  for (const float x : values) sum += f(static_cast<double>(x));
  return sum / static_cast<double>(values.size());
}

TEST(TokenRandom, MomentsAreThoseOfFourUniformVariables) {
  constexpr int64_t width = 1 << 20;
  const std::vector<float> x = row_of({1, TokenTensor::q}, 0, width);
  const double sigma = 1 / std::sqrt(static_cast<double>(width));
  EXPECT_NEAR(mean_of(x, [](double v) { return v; }), 0, 5 * sigma);
  EXPECT_NEAR(mean_of(x, [](double v) { return v * v; }), 1, 5 * 1.31 * sigma);
  EXPECT_NEAR(mean_of(x, [](double v) { return v * v * v; }), 0, 5 * 3.2 * sigma);
  EXPECT_NEAR(mean_of(x, [](double v) { return v * v * v * v; }), 2.7, 5 * 6.3 * sigma);
  EXPECT_LE(*std::max_element(x.begin(), x.end()), 2 * std::sqrt(3.0F));
  EXPECT_GE(*std::max_element(x.begin(), x.end()), 3.2F);
  // Shares within 1 and 2 of 0, from the distribution of the sum.
  const auto within = [&](double limit) {
    return mean_of(x, [&](double v) { return std::abs(v) < limit ? 1.0 : 0.0; });
  };
  EXPECT_NEAR(within(1), 0.669278, 5 * 0.5 * sigma);
  EXPECT_NEAR(within(2), 0.957454, 5 * 0.5 * sigma);
}

/// Correlation of equally long rows of standard variables.
double correlation(const std::vector<float>& a, const std::vector<float>& b, size_t lag = 0) {
  double sum = 0;
  for (size_t i = lag; i < a.size(); ++i)
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i - lag]);
  return sum / static_cast<double>(a.size() - lag);
}

TEST(TokenRandom, NeighboursAreIndependent) {
  constexpr int64_t width = 1 << 16;
  const double limit = 5 / std::sqrt(static_cast<double>(width));
  const std::vector<float> row = row_of({1, TokenTensor::q}, 10, width);
  EXPECT_LT(std::abs(correlation(row, row_of({1, TokenTensor::q}, 11, width))), limit);
  EXPECT_LT(std::abs(correlation(row, row_of({1, TokenTensor::k}, 10, width))), limit);
  EXPECT_LT(std::abs(correlation(row, row_of({2, TokenTensor::q}, 10, width))), limit);
  EXPECT_LT(std::abs(correlation(row, row_of({0, TokenTensor::k}, 10, width))), limit);
  for (const size_t lag : {1U, 2U, 64U, 128U})
    EXPECT_LT(std::abs(correlation(row, row, lag)), limit);
  // Down a column, token by token.
  std::vector<float> column;
  for (int64_t token = 0; token < width; ++token)
    column.push_back(row_of({1, TokenTensor::q}, token, 3)[2]);
  EXPECT_NEAR(correlation(column, column), 1, 1.31 * limit);
  EXPECT_LT(std::abs(correlation(column, column, 1)), limit);
}

}  // namespace GYRE_FILE
}  // namespace gyre
