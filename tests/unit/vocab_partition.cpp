// Who holds which columns, and what cannot be a partition.

#include "logprobs/vocab_partition.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_usage;
using Longs = std::vector<int64_t>;

TEST(VocabPartition, EvenShardsWithPaddingInTheLast) {
  const VocabPartition vocab = even_partition(259, 264, 3);
  EXPECT_EQ(vocab.offsets, (Longs{0, 88, 176, 264}));
  EXPECT_EQ(vocab.ranks(), 3);
  EXPECT_EQ(vocab.padded(), 264);
  EXPECT_EQ(vocab.begin(2), 176);
  EXPECT_EQ(vocab.columns(2), 88);
  EXPECT_EQ((Longs{vocab.valid(0), vocab.valid(1), vocab.valid(2)}), (Longs{88, 88, 83}));
}

TEST(VocabPartition, PaddingMayFillWholeShards) {
  const VocabPartition vocab = even_partition(5, 16, 4);
  EXPECT_EQ((Longs{vocab.valid(0), vocab.valid(1), vocab.valid(2), vocab.valid(3)}),
            (Longs{4, 1, 0, 0}));
}

TEST(VocabPartition, OwnersOfIds) {
  const VocabPartition vocab = partition_of(Longs{3, 0, 4, 2}, 8);
  const std::vector<int> owners = {0, 0, 0, 2, 2, 2, 2, 3};
  for (size_t id = 0; id < owners.size(); ++id)
    EXPECT_EQ(vocab.owner(static_cast<int64_t>(id)), owners[id]);
  for (const int64_t id : {-1, -100, 8, 9, 1 << 30}) EXPECT_EQ(vocab.owner(id), -1) << id;
}

TEST(VocabPartition, BalancedShardsDifferByOneAtMost) {
  EXPECT_EQ(balanced_partition(11, 4).offsets, (Longs{0, 3, 6, 9, 11}));
  EXPECT_EQ(balanced_partition(2, 4).offsets, (Longs{0, 1, 2, 2, 2}));
  EXPECT_EQ(balanced_partition(11, 4).vocab_size, 11);
}

TEST(VocabPartition, EveryIdHasOneOwnerWhoseShardHasIt) {
  EXPECT_TRUE(rc::check("shards of any sizes", [] {
    Longs columns = *rc::gen::container<Longs>(rc::gen::inRange<int64_t>(0, 6));
    columns.push_back(*rc::gen::inRange<int64_t>(1, 6));
    const VocabPartition whole = partition_of(columns, 1);
    const int64_t vocab_size = *rc::gen::inRange<int64_t>(1, whole.padded() + 1);
    const VocabPartition vocab = partition_of(columns, vocab_size);
    check_partition(vocab, static_cast<int>(columns.size()));
    int64_t valid = 0;
    for (int r = 0; r < vocab.ranks(); ++r) {
      RC_ASSERT(vocab.columns(r) == columns[r]);
      for (int64_t c = 0; c < vocab.columns(r); ++c) {
        const int64_t id = vocab.begin(r) + c;
        RC_ASSERT(vocab.owner(id) == (id < vocab_size ? r : -1));
        RC_ASSERT((c < vocab.valid(r)) == (id < vocab_size));
      }
      valid += vocab.valid(r);
    }
    RC_ASSERT(valid == vocab_size);
  }));
}

TEST(VocabPartition, ErrorsNameTheNearestValidNumber) {
  expect_usage("13 columns cannot be dealt evenly to 4 ranks; 16 can",
               [] { even_partition(13, 13, 4); });
  expect_usage("8 columns cannot be dealt evenly to 0 ranks; 8 can",
               [] { even_partition(8, 8, 0); });
  expect_usage("a vocabulary of 9 ids in 8 columns; it needs at least one id and one column each",
               [] { even_partition(9, 8, 4); });
  expect_usage("a vocabulary of 0 ids in 8 columns; it needs at least one id and one column each",
               [] { even_partition(0, 8, 4); });
  expect_usage("shard 1 has -2 columns; the fewest are 0", [] {
    partition_of(Longs{3, -2, 1}, 2);
  });
  expect_usage("a vocabulary of 5 ids in 4 columns; it needs at least one id and one column each",
               [] {
                 partition_of(Longs{3, 1}, 5);
               });
  expect_usage("a vocabulary of 0 ids in 0 columns; it needs at least one id and one column each",
               [] { balanced_partition(0, 2); });
}

TEST(VocabPartition, PartitionsMadeByHandAreChecked) {
  check_partition({{0, 2, 2, 5}, 4}, 3);
  expect_usage("a vocabulary in 3 shards for a group of 2 ranks; it must be one shard a rank", [] {
    check_partition({{0, 2, 2, 5}, 4}, 2);
  });
  expect_usage("a vocabulary in -1 shards for a group of 1 ranks; it must be one shard a rank", [] {
    check_partition({{}, 4}, 1);
  });
  expect_usage("the first shard of the vocabulary begins at column 1; it must be 0", [] {
    check_partition({{1, 2, 5}, 4}, 2);
  });
  expect_usage("shard 1 has -3 columns; the fewest are 0", [] {
    check_partition({{0, 5, 2, 6}, 4}, 3);
  });
  expect_usage("a vocabulary of 6 ids in 5 columns; it needs at least one id and one column each",
               [] {
                 check_partition({{0, 2, 5}, 6}, 2);
               });
}

}  // namespace GYRE_FILE
}  // namespace gyre
