// The arithmetic that the device's row passes are made of, where there is no device: cut into
// threads and parts in any way, it gives what the host's passes do.

#include "logprobs/row_arithmetic.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "logprob_cases.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/row_digits.hpp"
#include "report/tolerance.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr double none = -HUGE_VAL;
constexpr float minus_infinity = -HUGE_VALF;

/// Sums of a row by `threads` threads in vectors of 4, in parts of so many columns.
SoftmaxPartial partials(const std::vector<float>& row, float scale, size_t threads, size_t part) {
  rows::PartSums total;
  const auto scale2 = static_cast<float>(static_cast<double>(scale) * rows::log2_e);
  for (size_t begin = 0; begin < row.size(); begin += part) {
    const size_t end = std::min(row.size(), begin + part);
    std::vector<rows::ThreadSums<true>> sums(threads, {scale2});
    for (size_t at = begin, thread = 0; at < end; at += 4, thread = (thread + 1) % threads) {
      float z[4];
      for (size_t i = 0; i < 4; ++i) z[i] = at + i < end ? row[at + i] : minus_infinity;
      sums[thread].add(z);
    }
    float max = minus_infinity;
    for (const auto& s : sums) max = std::max(max, s.max);
    rows::PartSums together{max};
    for (const auto& s : sums) {
      const rows::PartSums mine = s.part(max);
      together.sum += mine.sum;
      together.weighted += mine.weighted;
    }
    total.add(together, scale2);
  }
  return rows::partials_of(total, true);
}

TEST(RowArithmetic, MomentsOfAnyCut) {
  test::LogitRows random = test::random_logits(1, 3000, DType::f32, 3);
  for (const double offset : {0.0, 1e4}) {
    std::vector<float> row;
    std::vector<double> exact;
    for (const double z : random.values) {
      row.push_back(z > 4 ? minus_infinity : static_cast<float>(z + offset));
      exact.push_back(static_cast<double>(row.back()));
    }
    const TokenScore want = score_row_reference(exact, 5, 2);
    for (const size_t threads : {size_t{1}, size_t{7}, size_t{256}})
      for (const size_t part : {size_t{100}, size_t{1024}, size_t{5000}}) {
        const SoftmaxPartial m = partials(row, 0.5F, threads, part);
        const double log_sum = std::log(static_cast<double>(m.sum));
        EXPECT_EQ(m.max, *std::max_element(row.begin(), row.end()));
        EXPECT_NEAR((exact[5] - static_cast<double>(m.max)) / 2 - log_sum, want.logprob,
                    logprob_tolerance() * logprob_scale(want.logprob));
        EXPECT_NEAR(log_sum - static_cast<double>(m.weighted) / static_cast<double>(m.sum),
                    want.entropy, logprob_tolerance() * entropy_scale(3000));
      }
  }
}

TEST(RowArithmetic, SpecialRows) {
  for (const size_t threads : {size_t{1}, size_t{3}}) {
    const SoftmaxPartial nothing = partials(std::vector<float>(40, minus_infinity), 1, threads, 16);
    EXPECT_EQ(nothing.max, minus_infinity);
    EXPECT_EQ(nothing.sum, 0);
    EXPECT_EQ(nothing.weighted, 0);
    for (const float bad : {HUGE_VALF, NAN})
      for (const size_t at : {size_t{0}, size_t{20}, size_t{39}})
        for (const float other : {minus_infinity, 1.0F, 3e38F}) {
          std::vector<float> row(40, other);
          row[at] = bad;
          const SoftmaxPartial m = partials(row, 1, threads, 16);
          EXPECT_TRUE(std::isnan(m.max) && std::isnan(m.sum) && std::isnan(m.weighted));
        }
    std::vector<float> far(40, -3e38F);
    far[30] = 3e38F;
    EXPECT_EQ(partials(far, 1, threads, 16).sum, 1);
    EXPECT_EQ(partials(far, 1, threads, 16).weighted, 0);
  }
}

TEST(RowArithmetic, EntriesOrderAsListsDo) {
  const float values[] = {NAN, HUGE_VALF, 2, 1e-40F, 0, -1e-40F, -2, minus_infinity};
  uint64_t before = ~uint64_t{0};
  for (const float value : values)
    for (const int64_t column : {0, 1, 5000000}) {
      const uint64_t entry = rows::entry_of(value, column);
      EXPECT_LT(entry, before) << value << ' ' << column;
      EXPECT_GT(entry, 0U);
      before = entry;
      EXPECT_EQ(rows::column_of_entry(entry), column);
      const float back = rows::value_of_order(rows::order_of_entry(entry));
      EXPECT_TRUE(back == value || (std::isnan(back) && std::isnan(value)));
    }
  EXPECT_EQ(rows::entry_of(-0.0F, 3), rows::entry_of(0.0F, 3));
}

TEST(RowArithmetic, BucketsAreThoseOfTheKeys) {
  const float values[] = {minus_infinity, -3.25F, -0.0F, 0.0F, 0.125F, 1, 2.5F, 1e30F};
  for (const DType type : {DType::f32, DType::bf16})
    for (const float low : {-3.25F, 0.125F})
      for (const int shift : {0, 8, 16}) {
        const MassScan scan{3, 1, 40, key_of(low, type), shift, true};
        for (const float z : values) {
          const uint32_t key = key_of(z, type);
          int64_t want = digit_buckets + 1;
          if (key >= scan.low) want = std::min<int64_t>(digit_buckets, (key - scan.low) >> shift);
          EXPECT_EQ(rows::bucket_of(z, type, scan), want) << z << ' ' << low << ' ' << shift;
        }
      }
  EXPECT_EQ(rows::mass_of(3, {3, 0.5F, 40}), uint64_t{1} << 40);
  EXPECT_EQ(rows::mass_of(minus_infinity, {3, 0.5F, 40}), 0U);
}

TEST(RowArithmetic, WhatARowGets) {
  using rows::RowKind;
  const RowNormalizer good{1, 2}, bad{NAN, 2}, empty{minus_infinity, minus_infinity};
  EXPECT_EQ(rows::kind_of(good, true, true), RowKind::values);
  EXPECT_EQ(rows::kind_of(good, false, true), RowKind::zeros);  // and what ids add
  EXPECT_EQ(rows::kind_of(bad, false, true), RowKind::nans);
  EXPECT_EQ(rows::kind_of(empty, true, true), RowKind::nans);
  EXPECT_EQ(rows::kind_of(bad, false, false), RowKind::zeros);
  EXPECT_EQ(rows::column_of(105, 100, 10), 5);
  EXPECT_EQ(rows::column_of(110, 100, 10), -1);
  EXPECT_EQ(rows::column_of(99, 100, 10), -1);
  EXPECT_EQ(rows::column_of(-1, -5, 10), -1);
  EXPECT_EQ(rows::past_alignment(reinterpret_cast<const void*>(64 + 6), 2, 8), 3);
}

TEST(RowArithmetic, SlopesOfElements) {
  const RowNormalizer row{4, 0.4519143956F};
  const rows::SlopeOf coefficient(row, 1, {-1, 0.5F});
  for (int z = 0; z < 5; ++z) {
    const double log_p = z - 4 - 0.4519143956, p = std::exp(log_p);
    EXPECT_NEAR(static_cast<double>(coefficient(static_cast<float>(z))), p * (-1 + 0.5 * log_p),
                logit_gradient_tolerance(DType::f32) * logit_gradient_scale(log_p, 1, 0.5, 0));
  }
  EXPECT_EQ(coefficient(static_cast<float>(none)), 0);
}

}  // namespace GYRE_FILE
}  // namespace gyre
