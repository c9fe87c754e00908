// Tokens, positions and targets of a shard, under every layout.

#include "sharding/local_batch.hpp"

#include <gtest/gtest.h>

#include "sharding/layouts.hpp"

namespace gyre {
namespace GYRE_FILE {

using Ints = std::vector<int32_t>;

TEST(LocalBatch, ShiftsTargetsBeforeSharding) {
  const Ints bounds = {0, 8};
  const Ints text = {10, 11, 12, 13, 14, 15, 16, 17};
  const std::vector<std::span<const int32_t>> documents = {text};
  const SegmentBounds b{bounds, bounds};
  const Layout layout = dual_chunk_swap(b, 2);
  EXPECT_EQ(make_local_batch(layout, b, documents, 0).targets, (Ints{11, 12, 17, -1}));
  EXPECT_EQ(make_local_batch(layout, b, documents, 1).targets, (Ints{13, 14, 15, 16}));
}

TEST(LocalBatch, TwoDocumentsWithPadding) {
  // Real lengths 7 and 3 in 8 and 4 slots, cp = 2.
  const Ints real = {0, 7, 10}, padded = {0, 8, 12};
  const Ints first = {1, 2, 3, 4, 5, 6, 7}, second = {11, 12, 13};
  const std::vector<std::span<const int32_t>> documents = {first, second};
  const SegmentBounds b{real, padded};
  const Layout layout = dual_chunk_swap(b, 2);
  const LocalBatch r0 = make_local_batch(layout, b, documents, 0);
  EXPECT_EQ(r0.tokens, (Ints{1, 2, 7, 0, 11, 0}));
  EXPECT_EQ(r0.positions, (Ints{0, 1, 6, 7, 0, 3}));
  EXPECT_EQ(r0.targets, (Ints{2, 3, -1, -1, 12, -1}));
  const LocalBatch r1 = make_local_batch(layout, b, documents, 1);
  EXPECT_EQ(r1.tokens, (Ints{3, 4, 5, 6, 12, 13}));
  EXPECT_EQ(r1.positions, (Ints{2, 3, 4, 5, 1, 2}));
  EXPECT_EQ(r1.targets, (Ints{4, 5, 6, 7, 13, -1}));
}

TEST(LocalBatch, EveryLayoutGivesEverySlotTheSameTokenPositionAndTarget) {
  const Ints real = {0, 5, 5, 6, 17}, padded = {0, 8, 8, 16, 32};
  std::vector<Ints> texts;
  for (const int n : {5, 0, 1, 11}) {
    Ints text;
    for (int i = 0; i < n; ++i) text.push_back(100 * n + i);
    texts.push_back(text);
  }
  const std::vector<std::span<const int32_t>> documents(texts.begin(), texts.end());
  const SegmentBounds b{real, padded};
  const LocalBatch whole = make_local_batch(dual_chunk_swap(b, 1), b, documents, 0);
  for (const LayoutKind& kind : layout_kinds())
    for (const int cp : {1, 2, 4}) {
      SCOPED_TRACE(kind.name + " cp " + std::to_string(cp));
      LayoutOptions options;
      options.cp = cp;
      options.chunk = 3;
      const Layout layout = kind.make(b, options);
      for (int r = 0; r < cp; ++r) {
        const LocalBatch mine = make_local_batch(layout, b, documents, r);
        const Ints index = shard_index(layout, r);
        for (size_t t = 0; t < index.size(); ++t) {
          const bool pad = index[t] >= 32;
          const auto slot = static_cast<size_t>(index[t]);
          EXPECT_EQ(mine.tokens[t], pad ? 0 : whole.tokens[slot]);
          EXPECT_EQ(mine.positions[t], pad ? 0 : whole.positions[slot]);
          EXPECT_EQ(mine.targets[t], pad ? no_target : whole.targets[slot]);
        }
      }
    }
}

}  // namespace GYRE_FILE
}  // namespace gyre
