// Log-probabilities and entropies from a vocabulary split over all ranks, against the whole row in
// double precision.

#include "logprobs/vocab_parallel.hpp"

#include <cmath>
#include <random>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace {

using test::world;

constexpr float inf = std::numeric_limits<float>::infinity();

/// Scores of rows [tokens][padded] with this rank's shard only; what lies outside it or in the
/// padding is NaN here.
std::vector<LogprobEntropy> score(const std::vector<std::vector<float>>& rows, int64_t vocab_size,
                                  int64_t padded, const std::vector<int32_t>& targets) {
  const VocabShard shard = vocab_shard(padded, world().size(), world().rank());
  const auto tokens = static_cast<int64_t>(rows.size());
  std::vector<float> logits(static_cast<size_t>(tokens * shard.columns), NAN);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < shard.columns && shard.begin + c < vocab_size; ++c)
      logits[static_cast<size_t>(t * shard.columns + c)] =
          rows[static_cast<size_t>(t)][static_cast<size_t>(shard.begin + c)];
  std::vector<RowStatistics> statistics(rows.size());
  row_statistics({logits.data(), tokens, shard.columns}, shard.begin, vocab_size, targets,
                 statistics);
  std::vector<LogprobEntropy> out(rows.size());
  HostStream stream;
  vocab_parallel_scores(statistics, targets, padded, world(), stream, out);
  return out;
}

/// [b=0][s][v] of the golden vectors: ((31 s + 17 v) mod 97) / 8 - 6, 64 columns.
std::vector<std::vector<float>> golden_rows() {
  std::vector<std::vector<float>> rows(8, std::vector<float>(64));
  for (size_t s = 0; s < 8; ++s)
    for (size_t v = 0; v < 64; ++v) rows[s][v] = static_cast<float>((31 * s + 17 * v) % 97) / 8 - 6;
  return rows;
}

TEST(VocabParallel, GoldenLogprobsAndEntropies) {
  if (64 % world().size() != 0) GTEST_SKIP() << "64 columns over " << world().size() << " ranks";
  std::vector<int32_t> targets;
  for (int s = 0; s < 8; ++s) targets.push_back((13 * s + 5) % 64);
  const auto scores = score(golden_rows(), 64, 64, targets);
  const double logprob[] = {-3.123163688,  -7.825016135, -12.917737857, -5.658393937,
                            -10.587148456, -5.776064173, -10.784641104, -3.470435309};
  const double entropy[] = {2.643832576, 2.637051615, 2.653252468, 2.676617565,
                            2.655697487, 2.672440759, 2.723055265, 2.654009122};
  for (size_t s = 0; s < 8; ++s) {
    EXPECT_NEAR(static_cast<double>(scores[s].logprob), logprob[s], 4e-6);
    EXPECT_NEAR(static_cast<double>(scores[s].entropy), entropy[s], 4e-6);
  }
}

TEST(VocabParallel, CrossEntropyOfFourLogitsOverAnyNumberOfRanks) {
  const auto scores = score({{1, 2, 3, 4, 0, 0, 0, 0}}, 4, round_up(4, world().size()), {2});
  EXPECT_NEAR(-static_cast<double>(scores[0].logprob), 1.440190, 1e-6);
}

TEST(VocabParallel, RandomRowsWithPaddedColumnsEqualTheTwin) {
  const int64_t padded = 24 * world().size(),
                vocab_size = padded - 30 > 0 ? padded - 30 : padded - 5;
  std::mt19937 generator(11);
  std::normal_distribution<float> normal(0, 4);
  std::vector<std::vector<float>> rows(40, std::vector<float>(static_cast<size_t>(padded), 1e30f));
  std::vector<int32_t> targets;
  for (size_t t = 0; t < rows.size(); ++t) {
    const float offset = t % 4 == 3 ? 1e4f : 0.0f;
    for (int64_t v = 0; v < vocab_size; ++v)
      rows[t][static_cast<size_t>(v)] = normal(generator) + offset;
    if (t % 5 == 1) rows[t][static_cast<size_t>(t) % static_cast<size_t>(vocab_size)] = -inf;
    targets.push_back(static_cast<int32_t>((7 * t + 3) % static_cast<size_t>(vocab_size)));
  }
  targets[5] = -1;
  const auto scores = score(rows, vocab_size, padded, targets);
  for (size_t t = 0; t < rows.size(); ++t) {
    const std::vector<double> whole(rows[t].begin(), rows[t].begin() + vocab_size);
    const TokenScore expected = score_row_reference(whole, std::max(0, targets[t]));
    EXPECT_NEAR(static_cast<double>(scores[t].entropy), expected.entropy, 1e-5) << t;
    if (targets[t] < 0)
      EXPECT_EQ(scores[t].logprob, 0.0f);
    else if (std::isinf(expected.logprob))
      EXPECT_EQ(scores[t].logprob, -inf);
    else
      EXPECT_NEAR(static_cast<double>(scores[t].logprob), expected.logprob, 2e-5) << t;
  }
}

TEST(VocabParallel, Specials) {
  if (world().size() > 3) GTEST_SKIP() << "three columns";
  const int64_t padded = 6;
  const auto one = [&](std::vector<float> row, int32_t target) {
    const auto size = static_cast<int64_t>(row.size());
    row.resize(6, NAN);
    return score({row}, size, padded, {target})[0];
  };
  EXPECT_NEAR(one({0, 1, -inf}, 0).logprob, -1.313261688f, 1e-6f);
  EXPECT_NEAR(one({0, 1, -inf}, 1).entropy, 0.582203109f, 1e-6f);
  EXPECT_EQ(one({0, 1, -inf}, 2).logprob, -inf);
  EXPECT_NEAR(one({1e4f, 1e4f, 0}, 0).logprob, -0.693147181f, 1e-6f);
  EXPECT_NEAR(one({1e4f, 1e4f, 0}, 2).logprob, -10000.693147f, 2e-3f);
  EXPECT_TRUE(std::isnan(one({NAN, 1, 0}, 1).logprob));
  EXPECT_TRUE(std::isnan(one({NAN, 1, 0}, 1).entropy));
}

TEST(VocabParallel, OneCollectiveOf16BytesATokenTheSameBitsOnAllRanks) {
  const int64_t padded = 8 * world().size();
  std::mt19937 generator(3);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> rows(10, std::vector<float>(static_cast<size_t>(padded)));
  for (auto& row : rows)
    for (float& x : row) x = normal(generator);
  const Traffic before = world().traffic();
  const auto scores = score(rows, padded, padded, std::vector<int32_t>(10, 2));
  const int n = world().size();
  EXPECT_EQ(world().traffic().messages - before.messages, n > 1 ? 1 : 0);
  EXPECT_EQ(world().traffic().bytes_sent - before.bytes_sent, (n - 1) * 10 * 16);
  for (const LogprobEntropy& s : scores) {
    const auto logprob = static_cast<double>(s.logprob), entropy = static_cast<double>(s.entropy);
    EXPECT_EQ(all_reduce_value(world(), logprob, ReduceOp::max),
              all_reduce_value(world(), logprob, ReduceOp::min));
    EXPECT_EQ(all_reduce_value(world(), entropy, ReduceOp::max),
              all_reduce_value(world(), entropy, ReduceOp::min));
  }
}

}  // namespace
}  // namespace gyre
