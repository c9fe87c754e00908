// Rows of equal width under dual-chunk-swap, with their key mask.

#include "sharding/bshd.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <functional>

#include "core/index.hpp"
#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::usage_message;
using Longs = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;

TEST(Bshd, RowsAreRoundedForBothContextAndTensorParallelism) {
  EXPECT_EQ(bshd_padded_width(10, 2, 1), 12);
  EXPECT_EQ(bshd_padded_width(10, 2, 0), 12);
  EXPECT_EQ(bshd_padded_width(10, 2, 2), 16);
  EXPECT_EQ(bshd_padded_width(21, 2, 4), 32);
  EXPECT_EQ(bshd_padded_width(17, 4, 2), 32);
  EXPECT_EQ(bshd_padded_width(12, 2, 1), 12);
  EXPECT_EQ(bshd_padded_width(0, 2, 1), 0);
}

/// Two rows of ten slots, the second with two slots of padding on its left; embeddings of 2 values.
struct Rows {
  std::vector<float> embeddings;
  Longs mask, targets;
  Rows() {
    for (int b = 0; b < 2; ++b)
      for (int t = 0; t < 10; ++t) {
        embeddings.push_back(static_cast<float>(100 * b + t + 1));
        embeddings.push_back(0.5f);
        mask.push_back(b == 1 && t < 2 ? 0 : 7);  // any value but 0 is real
        targets.push_back(t == 9 ? -100 : 100 * b + t);
      }
  }
  BshdShard<float> shard(int cp, int rank, int tp) const {
    return shard_bshd<float>(embeddings, mask, targets, 2, 2, cp, rank, tp);
  }
};

TEST(Bshd, ShardsHoldBothChunksOfEveryRow) {
  const BshdShard<float> first = Rows().shard(2, 0, 1), second = Rows().shard(2, 1, 1);
  EXPECT_EQ(first.slots(), 6);
  EXPECT_EQ(first.targets, (Longs{0, 1, 2, -100, -100, -100, 100, 101, 102, -100, -100, -100}));
  EXPECT_EQ(second.targets, (Longs{3, 4, 5, 6, 7, 8, 103, 104, 105, 106, 107, 108}));
  EXPECT_EQ(first.inputs,
            (std::vector<float>{1,   0.5f, 2,   0.5f, 3,   0.5f, 10,  0.5f, 0, 0, 0, 0,
                                101, 0.5f, 102, 0.5f, 103, 0.5f, 110, 0.5f, 0, 0, 0, 0}));
}

TEST(Bshd, TheKeyMaskHidesPaddingOnBothSides) {
  const BshdShard<float> first = Rows().shard(2, 0, 1), second = Rows().shard(2, 1, 1);
  EXPECT_EQ(first.key_mask, (Bytes{1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0}));
  EXPECT_EQ(second.key_mask, Bytes(12, 1));
}

TEST(Bshd, EverySlotIsOnOneRankAndTheRestIsPadding) {
  EXPECT_TRUE(rc::check("the shards of all ranks are the padded rows", [] {
    const int cp = *rc::gen::inRange(1, 6), tp = *rc::gen::inRange(0, 4);
    const int64_t n = *rc::gen::inRange<int64_t>(0, 60), batch = *rc::gen::inRange<int64_t>(1, 4);
    std::vector<float> embeddings;
    Longs mask, targets;
    for (int64_t i = 0; i < batch * n; ++i) {
      embeddings.push_back(static_cast<float>(i + 1));
      mask.push_back(i % 3);
      targets.push_back(i);
    }
    const int64_t width = bshd_padded_width(n, cp, tp), chunk = width / (2 * cp);
    RC_ASSERT(width - n < 2 * cp * std::max(1, tp));
    for (int rank = 0; rank < cp; ++rank) {
      const BshdShard<float> shard =
          shard_bshd<float>(embeddings, mask, targets, batch, 1, cp, rank, tp);
      RC_ASSERT(shard.slots() == 2 * chunk);
      RC_ASSERT(shard.slots() % std::max(1, tp) == 0);
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t t = 0; t < 2 * chunk; ++t) {
          const int64_t slot =
              t < chunk ? rank * chunk + t : (2 * cp - 1 - rank) * chunk + t - chunk;
          const auto local = static_cast<size_t>(b * 2 * chunk + t);
          const int64_t i = b * n + slot;
          RC_ASSERT(shard.targets[local] == (slot < n ? i : -100));
          RC_ASSERT(shard.key_mask[local] == (slot < n && i % 3 != 0 ? 1 : 0));
          RC_ASSERT(shard.inputs[local] == (slot < n ? static_cast<float>(i + 1) : 0.0f));
        }
    }
  }));
}

TEST(Bshd, ErrorsNameTheSizes) {
  const std::vector<float> embeddings(12);
  const Longs six(6), five(5);
  EXPECT_EQ(usage_message([&] { shard_bshd<float>(embeddings, six, five, 2, 2, 2, 0, 1); }),
            "6 mask values and 5 targets; both must be 2 rows of equal width");
  EXPECT_EQ(usage_message([&] { shard_bshd<float>(embeddings, five, five, 2, 2, 2, 0, 1); }),
            "5 mask values and 5 targets; both must be 2 rows of equal width");
  EXPECT_EQ(usage_message([&] { shard_bshd<float>(embeddings, six, six, 2, 3, 2, 0, 1); }),
            "12 input values, but 2 rows x 3 slots x 3 are 18");
  EXPECT_EQ(usage_message([&] { shard_bshd<float>(embeddings, six, six, 2, 2, 2, 2, 1); }),
            "rank 2 of cp = 2 ranks");
  EXPECT_EQ(usage_message([&] { shard_bshd<float>(embeddings, six, six, 0, 2, 2, 0, 1); }),
            "0 rows with inputs of 2 values; both are at least 1");
  EXPECT_EQ(usage_message([&] { bshd_padded_width(4, 0, 1); }), "cp must be at least 1, not 0");
  EXPECT_EQ(usage_message([&] { bshd_padded_width(4, 2, -1); }), "tp must be at least 0, not -1");
}

}  // namespace GYRE_FILE
}  // namespace gyre
