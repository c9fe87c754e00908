// Targets of local slots, by index arithmetic of any layout.

#include "logprobs/sequence_scores.hpp"

#include <rapidcheck.h>

#include <numeric>
#include <string>

#include "errors.hpp"
#include "layout_cases.hpp"
#include "sharding/local_batch.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Bounds;
using test::bounds_of;
using test::expect_usage;
using Ints = std::vector<int32_t>;

/// "ab.0" as ids: letters are themselves, 0 is id 0 and "." no target.
Ints ids(const std::string& text) {
  Ints result;
  for (const char c : text) result.push_back(c == '0' ? 0 : c == '.' ? no_target : c);
  return result;
}

/// abc, defgh, ij in 4, 8, 4 slots.
Bounds example() {
  return bounds_of({3, 5, 2}, {4, 8, 4});
}

TEST(NextTokenTargets, OfTheExampleOnTwoRanks) {
  const Bounds bounds = example();
  const Layout layout = dual_chunk_swap(bounds.view(), 2);
  const Ints stream = ids("abc0defgh000ij00");
  EXPECT_EQ(next_token_targets(layout, bounds.padded, stream, 0), ids("b.ef0.j."));
  EXPECT_EQ(next_token_targets(layout, bounds.padded, stream, 1), ids("c0gh0000"));
  EXPECT_EQ(next_token_targets(dual_chunk_swap(bounds.view(), 1), bounds.padded, stream, 0),
            ids("bc0.efgh000.j00."));
}

TEST(RolledTargets, OfTheExampleHoldTheFirstTokenInLastSlots) {
  const Bounds bounds = example();
  const Layout layout = dual_chunk_swap(bounds.view(), 2);
  const Ints rows = ids("abc00defghij000");
  EXPECT_EQ(rolled_targets(layout, bounds.view(), rows, 5, 0), ids("baef0dji"));
  EXPECT_EQ(rolled_targets(layout, bounds.view(), rows, 5, 1), ids("c0gh0000"));
}

TEST(NextTokenTargets, AreTheStreamShiftedInSegmentsThenSharded) {
  EXPECT_TRUE(rc::check([] {
    const test::LayoutCase c = test::arbitrary_layout();
    Ints stream(static_cast<size_t>(c.layout.stream_slots));
    std::iota(stream.begin(), stream.end(), 100);
    const Ints shifted = shift_left<int32_t>(c.bounds.padded, stream, no_target);
    for (int rank = 0; rank < c.layout.cp(); ++rank) {
      Ints local(static_cast<size_t>(c.layout.shard(rank).slots));
      shard_rows<int32_t>(c.layout, rank, shifted, local, 1, no_target);
      RC_ASSERT(next_token_targets(c.layout, c.bounds.padded, stream, rank) == local);
    }
  }));
}

TEST(RolledTargets, DifferFromNextTokensInLastSlotsOnly) {
  EXPECT_TRUE(rc::check([] {
    const test::LayoutCase c = test::arbitrary_layout();
    const SegmentBounds bounds = c.bounds.view();
    int64_t width = *rc::gen::inRange(0, 4);
    for (int64_t i = 0; i < bounds.segments(); ++i) width = std::max(width, bounds.real_length(i));
    Ints stream(static_cast<size_t>(bounds.slots()), 0);
    Ints rows(static_cast<size_t>(bounds.segments() * width), -7);  // not read beyond the length
    for (int64_t i = 0; i < bounds.segments(); ++i)
      for (int64_t p = 0; p < bounds.real_length(i); ++p)
        stream[bounds.begin(i) + p] = rows[i * width + p] = static_cast<int32_t>(1 + 50 * i + p);
    const Ints segments = segment_ids(c.bounds.padded);
    for (int rank = 0; rank < c.layout.cp(); ++rank) {
      Ints next = next_token_targets(c.layout, c.bounds.padded, stream, rank);
      const Ints index = shard_index(c.layout, rank);
      for (size_t t = 0; t < next.size(); ++t) {
        if (index[t] >= c.layout.stream_slots) continue;
        const int64_t segment = segments[index[t]];
        if (index[t] + 1 == c.bounds.padded[static_cast<size_t>(segment) + 1])
          next[t] = stream[bounds.begin(segment)];
      }
      RC_ASSERT(rolled_targets(c.layout, bounds, rows, width, rank) == next);
    }
  }));
}

/// A last segment of `recorded` slots and real tokens whose row has only `width` of them.
void expect_inflated(int64_t width, int64_t recorded, int cp) {
  SCOPED_TRACE(testing::Message() << width << " in " << recorded << ", cp " << cp);
  const Bounds bounds = bounds_of({2, recorded}, {16, recorded});
  const Layout layout = dual_chunk_swap(bounds.view(), cp);
  Ints rows(static_cast<size_t>(2 * width), 0);
  rows[0] = rows[1] = 5;
  std::iota(rows.begin() + width, rows.end(), 1000);
  Ints expected = {5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5};
  for (int64_t p = 1; p < width; ++p) expected.push_back(static_cast<int32_t>(1000 + p));
  expected.resize(16 + recorded - 1, 0);
  expected.push_back(1000);
  for (int rank = 0; rank < cp; ++rank) {
    Ints local(static_cast<size_t>(layout.shard(rank).slots));
    shard_rows<int32_t>(layout, rank, expected, local);
    EXPECT_EQ(rolled_targets(layout, bounds.view(), rows, width, rank), local);
  }
}

TEST(RolledTargets, OfALastLengthBeyondItsRowAreThoseOfTheRowThenZeros) {
  for (const int cp : {1, 2, 8}) {
    expect_inflated(7040, 9472, cp);
    expect_inflated(64, 96, cp);
  }
}

TEST(NextTokenTargets, OfManySequencesAndEmptyOnes) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 130; ++i) lengths.push_back(i % 4);
  const Bounds bounds = test::full_bounds(lengths);
  LayoutOptions options;
  options.cp = 3;
  const Layout layout = striped(bounds.view(), options);
  Ints stream(static_cast<size_t>(layout.stream_slots));
  std::iota(stream.begin(), stream.end(), 0);
  Ints expected;
  for (const int64_t length : lengths)
    for (int64_t p = 0; p < length; ++p)
      expected.push_back(p + 1 < length ? static_cast<int32_t>(expected.size()) + 1 : no_target);
  for (int rank = 0; rank < 3; ++rank) {
    const Ints targets = next_token_targets(layout, bounds.padded, stream, rank);
    for (size_t t = 0; t < targets.size(); ++t) {
      const size_t slot = 3 * t + static_cast<size_t>(rank);
      EXPECT_EQ(targets[t], slot < expected.size() ? expected[slot] : no_target);
    }
  }
}

TEST(NextTokenTargets, AgreeWithThoseOfALocalBatchForRealTokens) {
  const Bounds bounds = example();
  const Ints a = ids("abc"), d = ids("defgh"), i = ids("ij");
  const std::vector<std::span<const int32_t>> documents = {a, d, i};
  const Layout layout = dual_chunk_swap(bounds.view(), 2);
  for (int rank = 0; rank < 2; ++rank) {
    const Ints batch = make_local_batch(layout, bounds.view(), documents, rank).targets;
    const Ints targets = next_token_targets(layout, bounds.padded, ids("abc0defgh000ij00"), rank);
    int compared = 0;
    for (size_t t = 0; t < batch.size(); ++t)
      if (batch[t] != no_target) {
        EXPECT_EQ(targets[t], batch[t]);
        ++compared;
      }
    EXPECT_GT(compared, 1);
  }
}

TEST(PredictionShape, HasAPlaceForAllButTheLastSlotUpToTheWidth) {
  const Ints bounds = {0, 4, 12, 12, 13, 16};
  const auto counts = [&](int64_t width) {
    const PredictionShape shape{bounds, width};
    std::vector<int64_t> result;
    for (int64_t i = 0; i < shape.segments(); ++i) result.push_back(shape.predictions(i));
    return result;
  };
  using Longs = std::vector<int64_t>;
  EXPECT_EQ(counts(5), (Longs{3, 5, 0, 0, 2}));
  EXPECT_EQ(counts(9), (Longs{3, 7, 0, 0, 2}));
  EXPECT_EQ(counts(0), (Longs{0, 0, 0, 0, 0}));
}

TEST(NextTokenTargets, RefuseBoundariesAndTokensThatDoNotFit) {
  const Bounds bounds = example();
  const Layout layout = dual_chunk_swap(bounds.view(), 2);
  const Ints stream(16, 1);
  const auto refuse = [&](const std::string& message, const Ints& b, const Ints& tokens, int rank) {
    expect_usage(message, [&] { next_token_targets(layout, b, tokens, rank); });
  };
  refuse("no segment boundaries; there are segments + 1, from 0", {}, stream, 0);
  refuse("segment boundaries must start at 0, not at 1", {1, 16}, stream, 0);
  refuse("segment 1: ends at slot 3, before its begin 4", {0, 4, 3, 16}, stream, 0);
  refuse("segment boundaries end at slot 12, but layout dual-chunk-swap is of 16 slots", {0, 12},
         stream, 0);
  refuse("15 tokens, but layout dual-chunk-swap is of 16 slots", bounds.padded, Ints(15, 1), 0);
  refuse("rank 2 of a layout of 2 ranks", bounds.padded, stream, 2);
  refuse("rank -1 of a layout of 2 ranks", bounds.padded, stream, -1);
}

TEST(RolledTargets, RefuseBoundsAndRowsThatDoNotFit) {
  const Bounds bounds = example();
  const Layout layout = dual_chunk_swap(bounds.view(), 2);
  const auto refuse = [&](const std::string& message, const Bounds& b, const Ints& rows,
                          int64_t width) {
    expect_usage(message, [&] { rolled_targets(layout, b.view(), rows, width, 0); });
  };
  refuse("segment 1: real length 9 and slot length 8; 0 <= real <= slots must hold",
         bounds_of({3, 9, 2}, {4, 8, 4}), Ints(30, 1), 10);
  refuse("14 tokens, but 3 rows of 5 are 15", bounds, Ints(14, 1), 5);
  refuse("segment 1: 5 tokens in a row of 4; only the last segment may be longer than its row",
         bounds, Ints(12, 1), 4);
  refuse("rows of -1 tokens; at least 0", bounds, {}, -1);
  refuse("segment boundaries end at slot 8, but layout dual-chunk-swap is of 16 slots",
         bounds_of({8}, {8}), Ints(8, 1), 8);
  expect_usage("rank 2 of a layout of 2 ranks",
               [&] { rolled_targets(layout, bounds.view(), Ints(15, 1), 5, 2); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
