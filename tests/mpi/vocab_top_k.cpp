// The largest logits of a split vocabulary against sorting whole rows: any partition, with ties,
// -inf, NaN and padding.

#include "logprobs/vocab_top_k.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>

#include "errors.hpp"
#include "logprob_cases.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::LogitRows;
using test::partitions;
using test::world;
constexpr double infinity = std::numeric_limits<double>::infinity();

struct Top {
  std::vector<float> values;
  std::vector<int32_t> ids;
};

Top largest(const LogitRows& rows, const VocabPartition& vocab, int64_t k, DType type,
            Communicator& tp = world(), int threads = 1) {
  const test::Matrix mine = rows.shard(vocab, tp.rank(), type);
  VocabTopK top(rows.tokens, vocab, k, threads, tp);
  EXPECT_EQ(top.length(), std::min(k, rows.vocab_size));
  const auto count = static_cast<size_t>(rows.tokens * top.length());
  Top result{std::vector<float>(count), std::vector<int32_t>(count)};
  HostStream stream;
  top.run(mine.ref(), stream, result.values, result.ids);
  return result;
}

/// The same from whole rows.
Top sorted(const LogitRows& rows, int64_t k) {
  Top want;
  for (int64_t t = 0; t < rows.tokens; ++t)
    for (const TopEntry& entry : top_k_reference(rows.row(t), k)) {
      want.values.push_back(static_cast<float>(entry.value));
      want.ids.push_back(entry.id);
    }
  return want;
}

/// Logits in steps, for ties.
LogitRows stepped_logits(int64_t tokens, int64_t vocab_size, double step, uint64_t seed) {
  LogitRows rows = test::random_logits(tokens, vocab_size, DType::f32, 2, seed);
  for (double& z : rows.values) z = std::round(z / step) * step;
  return rows;
}

TEST(VocabTopK, FiveOfTwoHundredAndFiftySixInBf16) {
  const LogitRows rows = test::random_logits(2 * 16, 256, DType::bf16);
  const Top want = sorted(rows, 5);
  for (const VocabPartition& vocab : partitions(256, world().size())) {
    const Top top = largest(rows, vocab, 5, DType::bf16);
    EXPECT_EQ(top.values, want.values);
    EXPECT_EQ(top.ids, want.ids);
  }
}

TEST(VocabTopK, TheFiveLargestOfGoldenRows) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const Top top = largest(test::golden_logits(), balanced_partition(64, world().size()), 5, type);
    EXPECT_EQ(std::vector(top.ids.begin(), top.ids.begin() + 5),
              (std::vector<int32_t>{57, 17, 34, 51, 11}));
    EXPECT_EQ(std::vector(top.values.begin(), top.values.begin() + 5),
              (std::vector<float>{6, 5.875F, 5.625F, 5.375F, 5.25F}));
    EXPECT_EQ(std::vector(top.ids.end() - 5, top.ids.end()),
              (std::vector<int32_t>{8, 25, 42, 2, 59}));
  }
}

TEST(VocabTopK, AnyPartitionTypeAndLengthIsTheStartOfTheSortedRows) {
  EXPECT_TRUE(rc::check("merged lists and sorting", [] {
    const int64_t vocab_size = *rc::gen::inRange<int64_t>(1, 300);
    const int64_t tokens = *rc::gen::inRange<int64_t>(0, 4);
    const int64_t k = *rc::gen::weightedOneOf<int64_t>(
        {{1, rc::gen::just(vocab_size)}, {3, rc::gen::inRange<int64_t>(1, 310)}});
    const double step = *rc::gen::element(0.125, 2.0);
    LogitRows rows = stepped_logits(tokens, vocab_size, step, *rc::gen::inRange<uint64_t>(0, 99));
    if (*rc::gen::arbitrary<bool>())
      for (double& z : rows.values)
        if (z < 0) z = -infinity;
    const DType type = *rc::gen::element(DType::f32, DType::bf16);
    const Top want = sorted(rows, k);
    for (const VocabPartition& vocab : partitions(vocab_size, world().size())) {
      const Top top = largest(rows, vocab, k, type);
      RC_ASSERT(top.values == want.values);
      RC_ASSERT(top.ids == want.ids);
    }
  }));
}

TEST(VocabTopK, TheLargestAloneIsTheArgmaxWithTheLowestId) {
  LogitRows rows(1, 20);
  for (const int64_t v : {3, 9, 19}) rows.at(0, v) = 1;
  for (const VocabPartition& vocab : partitions(20, world().size()))
    EXPECT_EQ(largest(rows, vocab, 1, DType::f32).ids, std::vector<int32_t>{3});
}

TEST(VocabTopK, NotANumberRanksAsTheLargest) {
  LogitRows rows = test::random_logits(1, 40, DType::f32);
  rows.at(0, 6) = infinity;
  for (const int64_t v : {5, 31}) rows.at(0, v) = std::numeric_limits<double>::quiet_NaN();
  for (const DType type : {DType::f32, DType::bf16})
    for (const VocabPartition& vocab : partitions(40, world().size())) {
      const Top top = largest(rows, vocab, 3, type);
      EXPECT_EQ(top.ids, (std::vector<int32_t>{5, 31, 6}));
      EXPECT_TRUE(std::isnan(top.values[0]) && std::isnan(top.values[1]));
    }
}

TEST(VocabTopK, DoesNotDependOnRanksNorThreads) {
  const LogitRows rows = stepped_logits(9, 200, 0.5, 3);
  const auto alone = world().split(world().rank());
  const Top want = largest(rows, balanced_partition(200, 1), 17, DType::f32, *alone);
  const Top top =
      largest(rows, balanced_partition(200, world().size()), 17, DType::f32, world(), 3);
  EXPECT_EQ(top.values, want.values);
  EXPECT_EQ(top.ids, want.ids);
}

TEST(VocabTopK, SendsEightBytesAnEntryAndSixInBf16) {
  const int n = world().size();
  const LogitRows rows = test::random_logits(4, 64 * n, DType::bf16);
  for (const DType type : {DType::f32, DType::bf16}) {
    const test::Matrix mine = rows.shard(even_partition(64 * n, 64 * n, n), world().rank(), type);
    VocabTopK top(4, even_partition(64 * n, 64 * n, n), 10, 1, world());
    std::vector<float> values(40);
    std::vector<int32_t> ids(40);
    HostStream stream;
    const Traffic before = world().traffic();
    top.run(mine.ref(), stream, values, ids);
    const int64_t entry = type == DType::f32 ? 8 : 6;
    EXPECT_EQ(world().traffic().bytes_sent - before.bytes_sent, (n - 1) * 4 * 10 * entry);
    EXPECT_EQ(world().traffic().messages - before.messages, n == 1 ? 0 : 1);
  }
}

TEST(VocabTopK, BadArgumentsAreUsageErrorsOnAllRanks) {
  const int n = world().size();
  const auto message = [&](int64_t tokens, int64_t k, int shards) {
    return agreed_message(
        [&] { VocabTopK(tokens, balanced_partition(64, shards), k, 1, world()); });
  };
  EXPECT_EQ(message(1, 0, n), "the 0 largest logits; the smallest valid number is 1");
  EXPECT_EQ(message(-1, 1, n), "-1 tokens; the fewest are 0");
  EXPECT_EQ(message(1, 1, n + 1),
            fmt::format("a vocabulary in {} shards for a group of {} ranks; it must be one shard a "
                        "rank",
                        n + 1, n));
  if (n == 1) return;
  EXPECT_EQ(message(1, world().rank() == 1 ? 3 : 2, n),
            "largest logits: the number of logits a token is 2 on rank 0, but 3 on rank 1; it must "
            "be the same on all ranks of the group");
}

}  // namespace GYRE_FILE
}  // namespace gyre
