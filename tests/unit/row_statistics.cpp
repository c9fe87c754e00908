#include "logprobs/row_statistics.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "close.hpp"
#include "runtime/buffer.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace {

using test::rounding;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// Statistics of one whole or partial row.
RowStatistics statistics(const std::vector<float>& row, int32_t target, int64_t first_column = 0,
                         int64_t vocab_size = 1 << 30) {
  RowStatistics out;
  row_statistics({row.data(), 1, std::ssize(row)}, first_column, vocab_size, {&target, 1},
                 {&out, 1});
  return out;
}

/// What the collective does, in double.
TokenScore combine(const std::vector<RowStatistics>& shards) {
  double max = -HUGE_VAL, sum = 0, weighted = 0, target = 0;
  for (const RowStatistics& r : shards) max = std::max(max, static_cast<double>(r.max));
  for (const RowStatistics& r : shards) {
    target += static_cast<double>(r.target);
    if (r.max == -infinity) continue;
    const double d = static_cast<double>(r.max) - max;
    sum += static_cast<double>(r.sum) * std::exp(d);
    weighted += (static_cast<double>(r.weighted) + d * static_cast<double>(r.sum)) * std::exp(d);
  }
  return {target - max - std::log(sum), std::log(sum) - weighted / sum};
}

void expect_matches_reference(const std::vector<float>& row,
                              const std::vector<RowStatistics>& shards, int32_t target) {
  const std::vector<double> exact(row.begin(), row.end());
  const TokenScore want = score_row_reference(exact, target), got = combine(shards);
  const double tolerance = rounding(static_cast<double>(row.size()));
  // log s is accurate absolutely; t / s is an average of differences that reach |z - max| of the
  // weighty terms.
  EXPECT_NEAR(got.logprob, want.logprob, tolerance * (1 + std::abs(want.logprob)));
  EXPECT_NEAR(got.entropy, want.entropy,
              tolerance * (2 + std::log(static_cast<double>(row.size()))));
}

std::vector<float> random_row(size_t columns, float spread, float offset, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> row(columns);
  test::fill_normal(row, random);
  for (float& z : row) z = z * spread + offset;
  return row;
}

TEST(RowStatistics, MatchesReferenceForAllLengths) {
  for (const size_t columns :
       {1, 2, 15, 16, 17, 31, 33, 64, 264, 1000, 1023, 1024, 1025, 1040, 5000, 152064})
    for (const float spread : {0.1F, 3.0F, 30.0F}) {
      SCOPED_TRACE(testing::Message() << columns << " columns, spread " << spread);
      const std::vector<float> row = random_row(columns, spread, 0, 5);
      const auto target = static_cast<int32_t>(columns / 2);
      const RowStatistics r = statistics(row, target);
      EXPECT_EQ(r.max, *std::max_element(row.begin(), row.end()));
      EXPECT_EQ(r.target, row[columns / 2]);
      expect_matches_reference(row, {r}, target);
    }
}

TEST(RowStatistics, EveryInstructionSet) {
  test::on_every_simd_target([] {
    for (const size_t columns : {1, 7, 264, 3001}) {
      std::vector<float> row = random_row(columns, 5, 0, 37);
      if (columns > 1) row[1] = -infinity;
      expect_matches_reference(row, {statistics(row, 0)}, 0);
    }
  });
}

TEST(RowStatistics, RisingAndFallingRowsMoveTheMaximum) {
  std::vector<float> row(6000);
  for (size_t i = 0; i < row.size(); ++i) row[i] = 0.05F * static_cast<float>(i) - 100;
  expect_matches_reference(row, {statistics(row, 5990)}, 5990);
  std::reverse(row.begin(), row.end());
  expect_matches_reference(row, {statistics(row, 9)}, 9);
}

TEST(RowStatistics, LargeCommonOffset) {
  for (const float offset : {1e4F, -1e4F, 1e30F}) {
    const std::vector<float> row = random_row(777, 1, offset, 11);
    expect_matches_reference(row, {statistics(row, 5)}, 5);
  }
}

TEST(RowStatistics, ShardsCombineToTheWholeRow) {
  const std::vector<float> row = random_row(1003, 4, 1, 13);
  for (const int32_t target : {0, 399, 400, 401, 1002}) {
    std::vector<RowStatistics> shards;
    int32_t first = 0;
    for (const int32_t columns : {400, 1, 602}) {
      const std::vector<float> shard(row.begin() + first, row.begin() + first + columns);
      shards.push_back(statistics(shard, target, first, 1003));
      const bool owned = target >= first && target < first + columns;
      EXPECT_EQ(shards.back().target, owned ? row[static_cast<size_t>(target)] : 0.0F);
      first += columns;
    }
    expect_matches_reference(row, shards, target);
  }
}

TEST(RowStatistics, PaddedColumnsTakeNoPart) {
  const std::vector<float> row = random_row(50, 2, 0, 17);
  for (const float garbage : {std::numeric_limits<float>::quiet_NaN(), 1e30F, infinity}) {
    std::vector<float> padded = row;
    padded.resize(64, garbage);
    const RowStatistics r = statistics(padded, 7, 100, 150), want = statistics(row, 7, 100, 150);
    EXPECT_EQ(0, std::memcmp(&r, &want, sizeof r));
    EXPECT_EQ(statistics(padded, 155, 100, 150).target, 0) << "target in the padding";
  }
}

TEST(RowStatistics, ShardWithoutValidColumns) {
  for (const int64_t vocab_size : {100, 60}) {
    const RowStatistics r = statistics({1, 2, 3}, 101, 100, vocab_size);
    EXPECT_EQ(r.max, -infinity);
    EXPECT_EQ(r.sum, 0);
    EXPECT_EQ(r.weighted, 0);
    EXPECT_EQ(r.target, 0);
  }
}

TEST(RowStatistics, InfinitelyUnlikelyColumns) {
  std::vector<float> row = random_row(3000, 2, 0, 19);
  for (size_t i = 0; i < 2000; ++i) row[i] = -infinity;
  row[2500] = -infinity;
  expect_matches_reference(row, {statistics(row, 2700)}, 2700);
  EXPECT_EQ(combine({statistics(row, 2500)}).logprob, -HUGE_VAL);

  const RowStatistics none = statistics(std::vector<float>(40, -infinity), 3);
  EXPECT_EQ(none.max, -infinity);
  EXPECT_EQ(none.sum, 0);
  EXPECT_EQ(none.weighted, 0);
}

TEST(RowStatistics, NotANumberIsNotHidden) {
  for (const size_t at : {0, 5, 40, 2000}) {
    std::vector<float> row = random_row(2100, 1, 0, 23);
    row[at] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(statistics(row, 1).sum)) << at;
    row[at] = infinity;
    EXPECT_TRUE(std::isnan(statistics(row, 1).sum)) << at;
  }
}

TEST(RowStatistics, NoTarget) {
  EXPECT_EQ(statistics({1, 2, 3}, -1).target, 0);
  EXPECT_EQ(statistics({1, 2, 3}, -100, 0, 3).target, 0);
  EXPECT_EQ(statistics({1, 2, 3}, 3, 0, 3).target, 0);
}

TEST(RowStatistics, HonoursTheStrideAndRepeatsBitForBit) {
  const bool old = poison_new_buffers(true);
  Buffer<float> storage(5 * 300);
  poison_new_buffers(old);
  std::mt19937 random(29);
  const MatrixView<float> logits(storage.data(), 5, 264, 300);
  for (int64_t r = 0; r < 5; ++r) test::fill_normal({logits.row(r), 264}, random);
  const std::vector<int32_t> targets{0, 263, 5, -1, 264};
  std::vector<RowStatistics> first(5), second(5);
  row_statistics(logits, 0, 264, targets, first);
  row_statistics(logits, 0, 264, targets, second);
  EXPECT_EQ(0, std::memcmp(first.data(), second.data(), 5 * sizeof(RowStatistics)));
  for (int64_t r = 0; r < 5; ++r) {
    const std::vector<float> row(logits.row(r), logits.row(r) + 264);
    EXPECT_EQ(statistics(row, 0).sum, first[static_cast<size_t>(r)].sum);
  }
}

// Golden vectors: A[s, v] = ((31·s + 17·v) mod 97) / 8 - 6 with V = 64, target (13·s + 5) mod 64.
TEST(RowStatistics, GoldenRows) {
  constexpr double lse[] = {7.748163688, 7.575016135, 7.792737857, 7.783393937,
                            7.837148456, 7.651064173, 7.784641104, 7.720435309};
  constexpr double logprob[] = {-3.123163688,  -7.825016135, -12.917737857, -5.658393937,
                                -10.587148456, -5.776064173, -10.784641104, -3.470435309};
  constexpr double entropy[] = {2.643832576, 2.637051615, 2.653252468, 2.676617565,
                                2.655697487, 2.672440759, 2.723055265, 2.654009122};
  for (int s = 0; s < 8; ++s) {
    std::vector<float> row(64);
    for (int v = 0; v < 64; ++v)
      row[static_cast<size_t>(v)] = static_cast<float>((31 * s + 17 * v) % 97) / 8 - 6;
    const RowStatistics r = statistics(row, (13 * s + 5) % 64);
    const TokenScore got = combine({r});
    const TokenScore exact =
        score_row_reference(std::vector<double>(row.begin(), row.end()), (13 * s + 5) % 64);
    const double tolerance = rounding(64) * 16;  // |z - max| stays below 16
    EXPECT_NEAR(static_cast<double>(r.max) + std::log(static_cast<double>(r.sum)), lse[s],
                tolerance);
    EXPECT_NEAR(got.logprob, logprob[s], tolerance);
    EXPECT_NEAR(got.entropy, entropy[s], tolerance);
    EXPECT_NEAR(exact.logprob, logprob[s], 6e-10);  // ten digits are given
    EXPECT_NEAR(exact.entropy, entropy[s], 6e-10);
  }
}

TEST(RowStatistics, GoldenSpecialRows) {
  const double tolerance = rounding(5) * 5;
  const TokenScore ramp = combine({statistics({0, 1, 2, 3, 4}, 0)});
  EXPECT_NEAR(ramp.logprob, -4.451914396, tolerance);
  EXPECT_NEAR(ramp.entropy, 0.999972828, tolerance);
  const TokenScore masked = combine({statistics({0, 1, -infinity}, 1)});
  EXPECT_NEAR(masked.logprob, -0.313261688, tolerance);
  EXPECT_NEAR(masked.entropy, 0.582203109, tolerance);
  EXPECT_NEAR(combine({statistics({1e4F, 1e4F, 0}, 0)}).logprob, -0.693147181, tolerance);
  EXPECT_NEAR(combine({statistics({1e4F, 1e4F, 0}, 2)}).logprob, -10000.693147, 1e-6);
  const TokenScore uniform = combine({statistics(std::vector<float>(64, 2.5F), 9)});
  EXPECT_NEAR(uniform.logprob, -4.158883083, tolerance);
  EXPECT_NEAR(uniform.entropy, 4.158883083, tolerance);
}

}  // namespace
}  // namespace gyre
