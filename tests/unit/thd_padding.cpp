// Padding of packed sequences, positions, the row packer and rounded streams.

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "errors.hpp"
#include "packing/cp_batch.hpp"
#include "packing/padding.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_usage;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

Ints prefix_sums(const Longs& lengths) {
  Ints bounds = {0};
  for (const int64_t length : lengths)
    bounds.push_back(bounds.back() + static_cast<int32_t>(length));
  return bounds;
}

TEST(PadBoundaries, RoundEachSlotLengthUp) {
  EXPECT_EQ(pad_boundaries(prefix_sums({3, 2, 4}), 8), (Ints{0, 8, 16, 24}));
  EXPECT_EQ(pad_boundaries(prefix_sums({2, 7, 4, 10}), 6), (Ints{0, 6, 18, 24, 36}));
  EXPECT_EQ(pad_boundaries(prefix_sums({7, 11, 5}), 4), (Ints{0, 8, 20, 28}));
  EXPECT_EQ(pad_boundaries(prefix_sums({4, 0, 8}), 4), (Ints{0, 4, 4, 12}));  // nothing to do
  EXPECT_EQ(pad_boundaries(prefix_sums({5, 3}), 1), (Ints{0, 5, 8}));
  EXPECT_EQ(pad_boundaries(Ints{0}, 4), (Ints{0}));
}

TEST(PadBoundaries, RejectWhatIsNoBoundaryList) {
  expect_usage("the multiple must be at least 1, not 0", [] { pad_boundaries(Ints{0, 3}, 0); });
  expect_usage("cu_seqlens must start at 0; it is empty", [] { pad_boundaries(Ints{}, 4); });
  expect_usage("cu_seqlens must start at 0; it starts at 2", [] { pad_boundaries(Ints{2, 4}, 4); });
  expect_usage("segment 1: cu_seqlens falls from 5 to 3; it must not decrease", [] {
    pad_boundaries(Ints{0, 5, 3}, 4);
  });
  expect_usage(
      "segment 1: 1073741824 slots after slot 1073741824 exceed the int32 range of cu_seqlens; at "
      "most 1073741823 fit",
      [] {
        pad_boundaries(Ints{0, 1, 2}, int64_t{1} << 30);
      });
  expect_usage(
      "segment 0: 2147483648 slots after slot 0 exceed the int32 range of cu_seqlens; at most "
      "2147483647 fit",
      [] {
        pad_boundaries(Ints{0, 1}, std::numeric_limits<int64_t>::max());
      });
}

TEST(PadThdSequences, MovesEachSequenceToItsSlots) {
  const Longs ids = {1, 1, 2, 2, 2}, labels = {11, 12, 21, 22, 23};
  const PaddedSequences padded = pad_thd_sequences(ids, labels, Ints{0, 2, 5}, 4);
  EXPECT_EQ(padded.ids, (Longs{1, 1, 0, 0, 2, 2, 2, 0}));
  EXPECT_EQ(padded.labels, (Longs{11, 12, -100, -100, 21, 22, 23, -100}));
  EXPECT_EQ(padded.cu_seqlens_padded, (Ints{0, 4, 8}));
  EXPECT_EQ(packed_positions(padded.cu_seqlens_padded), (Longs{0, 1, 2, 3, 0, 1, 2, 3}));
  const PaddedSequences other = pad_thd_sequences(ids, labels, Ints{0, 2, 5}, 4, 9, -1);
  EXPECT_EQ(other.ids, (Longs{1, 1, 9, 9, 2, 2, 2, 9}));
  EXPECT_EQ(other.labels, (Longs{11, 12, -1, -1, 21, 22, 23, -1}));
}

TEST(PadThdSequences, RejectsArraysOfOtherLengths) {
  expect_usage("4 ids and 5 labels; cu_seqlens ends at 5, so both must hold 5", [] {
    pad_thd_sequences(Longs(4), Longs(5), Ints{0, 2, 5}, 4);
  });
  expect_usage("5 ids and 6 labels; cu_seqlens ends at 5, so both must hold 5", [] {
    pad_thd_sequences(Longs(5), Longs(6), Ints{0, 2, 5}, 4);
  });
}

TEST(PadThdSequences, RealTokensSurviveInOrder) {
  EXPECT_TRUE(rc::check("what is not padding is the input", [] {
    const auto lengths = *rc::gen::container<Longs>(rc::gen::inRange<int64_t>(0, 40));
    const int64_t multiple = *rc::gen::inRange<int64_t>(1, 17);
    const Ints cu = prefix_sums(lengths);
    Longs ids(static_cast<size_t>(cu.back()));
    std::iota(ids.begin(), ids.end(), 1);
    const PaddedSequences padded = pad_thd_sequences(ids, ids, cu, multiple, -7);
    RC_ASSERT(std::ssize(padded.ids) == padded.cu_seqlens_padded.back());
    Longs kept;
    for (const int64_t id : padded.ids)
      if (id != -7) kept.push_back(id);
    RC_ASSERT(kept == ids);
    for (size_t i = 0; i < lengths.size(); ++i) {
      const int64_t slots = padded.cu_seqlens_padded[i + 1] - padded.cu_seqlens_padded[i];
      RC_ASSERT(slots % multiple == 0);
      RC_ASSERT(slots >= lengths[i]);
      RC_ASSERT(slots < lengths[i] + multiple);
    }
  }));
}

// Positions.

TEST(PackedPositions, RestartInEachSegmentAndCountThroughItsPadding) {
  EXPECT_EQ(packed_positions(Ints{0, 8, 8, 10}), (Longs{0, 1, 2, 3, 4, 5, 6, 7, 0, 1}));
  EXPECT_EQ(packed_positions(Ints{0, 5}, 3), (Longs{0, 1, 2, 3, 3}));
  EXPECT_TRUE(packed_positions(Ints{0}).empty());
  EXPECT_TRUE(packed_positions(Ints{}).empty());
}

TEST(PadPositions, ThreeConventions) {
  const auto padded = [](PadPositions kind, Longs positions) {
    pad_positions(positions, 6, kind);
    return positions;
  };
  EXPECT_EQ(padded(PadPositions::counting, {0, 1, 0}), (Longs{0, 1, 0, 1, 2, 3}));
  EXPECT_EQ(padded(PadPositions::zero, {0, 1, 0}), (Longs{0, 1, 0, 0, 0, 0}));
  EXPECT_EQ(padded(PadPositions::restarted, {0, 1, 0}), (Longs{0, 1, 0, 0, 1, 2}));
  EXPECT_EQ(padded(PadPositions::counting, {}), (Longs{0, 1, 2, 3, 4, 5}));
  Longs full = {4, 5};
  pad_positions(full, 2, PadPositions::zero);
  EXPECT_EQ(full, (Longs{4, 5}));
  expect_usage("2 positions cannot be padded to 1; the least is 2",
               [&] { pad_positions(full, 1, PadPositions::zero); });
}

// Rows.

RowPackOptions row_options(int64_t row, int cp) {
  RowPackOptions options;
  options.row = row;
  options.cp = cp;
  return options;
}

TEST(PackRows, LastSampleTakesTheRestOfItsRow) {
  const RowPacking packing = pack_rows(Longs{3, 5}, row_options(16, 2));
  ASSERT_EQ(packing.rows.size(), 1u);
  EXPECT_EQ(packing.rows[0].samples, (Longs{0, 1}));
  EXPECT_EQ(packing.rows[0].seq_lens, (Longs{3, 5}));
  EXPECT_EQ(packing.rows[0].seq_lens_padded, (Longs{4, 12}));
  EXPECT_TRUE(packing.dropped.empty());
}

TEST(PackRows, ClosesARowAtTheFirstMisfitAndDropsWhatNoRowHolds) {
  // Rounded to 4: 8, 8, 20 (dropped), 4, 16.
  const RowPacking packing = pack_rows(Longs{5, 7, 17, 2, 13}, row_options(16, 2));
  ASSERT_EQ(packing.rows.size(), 3u);
  EXPECT_EQ(packing.rows[0].seq_lens_padded, (Longs{8, 8}));
  EXPECT_EQ(packing.rows[1].samples, (Longs{3}));
  EXPECT_EQ(packing.rows[1].seq_lens_padded, (Longs{16}));
  EXPECT_EQ(packing.rows[2].samples, (Longs{4}));
  EXPECT_EQ(packing.dropped, (Longs{2}));
}

TEST(PackRows, OneRankNeedsNoRounding) {
  const RowPacking packing = pack_rows(Longs{5, 3}, row_options(10, 1));
  EXPECT_EQ(packing.rows[0].seq_lens_padded, (Longs{5, 5}));
}

TEST(PackRows, RejectsRowsThatChunksCannotFill) {
  expect_usage("row width 10 is not a positive multiple of 4 (2·cp); the nearest are 8 and 12",
               [] { pack_rows(Longs{5}, row_options(10, 2)); });
  expect_usage("row width 3 is not a positive multiple of 4 (2·cp); the least is 4",
               [] { pack_rows(Longs{3}, row_options(3, 2)); });
  expect_usage("row width -8 is not a positive multiple of 4 (2·cp); the least is 4",
               [] { pack_rows(Longs{3}, row_options(-8, 2)); });
  expect_usage(
      "row width 2147483648 exceeds the int32 range of cu_seqlens; the largest is "
      "2147483644",
      [] { pack_rows(Longs{3}, row_options(int64_t{1} << 31, 2)); });
  expect_usage("cp must be at least 1, not 0", [] { pack_rows(Longs{3}, row_options(8, 0)); });
}

TEST(PackRows, RejectsSamplesUpFrontWhereAsked) {
  RowPackOptions options = row_options(8, 2);
  options.oversize = OversizeSample::reject;
  expect_usage(
      "sample 2: length 14 takes 16 slots in a row of 8 (the longest of 2 that do not fit); rows "
      "of 16 would hold all",
      [&] {
        pack_rows(Longs{3, 9, 14}, options);
      });
  expect_usage("sample 0: length -1 is negative; the least is 0",
               [&] { pack_rows(Longs{-1}, options); });
  expect_usage(
      "sample 0: length 2147483648 exceeds the int32 range of cu_seqlens; the largest is "
      "2147483647",
      [&] { pack_rows(Longs{int64_t{1} << 31}, options); });
}

TEST(PackRows, RejectsNothingPacked) {
  expect_usage("nothing was packed: none of 2 samples fits in a row of 8 slots", [] {
    pack_rows(Longs{9, 20}, row_options(8, 2));
  });
  expect_usage("nothing was packed: none of 0 samples fits in a row of 8 slots",
               [] { pack_rows(Longs{}, row_options(8, 2)); });
}

TEST(PackRows, RowsCanBeShardedAsTheyAre) {
  EXPECT_TRUE(rc::check("packed rows convert and shard; every real token is on one rank", [] {
    const int cp = *rc::gen::inRange(1, 5);
    const RowPackOptions options = row_options(2 * cp * *rc::gen::inRange<int64_t>(1, 9), cp);
    const auto lengths = *rc::gen::nonEmpty(
        rc::gen::container<Longs>(rc::gen::inRange<int64_t>(0, options.row + 1)));
    const RowPacking packing = pack_rows(lengths, options);
    RC_ASSERT(packing.dropped.empty());
    LengthTables tables = length_tables(packing.rows);
    BshdBatch batch;
    batch.rows = std::ssize(packing.rows);
    batch.slots = options.row;
    batch.labels.assign(batch.rows * batch.slots, 0);
    batch.inputs = TokenIds(batch.labels);
    batch.positions = PositionIds{1, batch.labels};
    batch.seq_lens = std::move(tables.seq_lens);
    batch.seq_lens_padded = std::move(tables.seq_lens_padded);
    CpOptions cp_options;
    cp_options.cp = cp;
    int64_t tokens = 0;
    for (cp_options.rank = 0; cp_options.rank < cp; ++cp_options.rank)
      tokens += count_real_tokens(make_cp_batch(batch, cp_options).padding_mask);
    RC_ASSERT(tokens == std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
  }));
}

TEST(LengthTables, FillShortRowsWithTheSentinel) {
  const RowPacking two = pack_rows(Longs{3, 2, 8}, row_options(8, 2));
  const LengthTables tables = length_tables(two.rows, -5);
  EXPECT_EQ(tables.seq_lens.rows, 2);
  EXPECT_EQ(tables.seq_lens.columns, 2);
  EXPECT_EQ(tables.seq_lens.cells, (Longs{3, 2, 8, -5}));
  EXPECT_EQ(tables.seq_lens_padded.cells, (Longs{4, 4, 8, -5}));
}

// Rounded streams.

TEST(RoundSequences, KeepsRealLengthsBesideSlots) {
  RoundOptions options;
  options.multiple = 8;
  options.cp = 2;
  options.tp = 2;
  const RoundedStream stream = round_sequences(Longs{3, 9, 8}, options);
  EXPECT_EQ(stream.cu_seqlens, (Ints{0, 3, 12, 20}));
  EXPECT_EQ(stream.cu_seqlens_padded, (Ints{0, 8, 24, 32}));
  EXPECT_EQ(stream.max_slots, 16);
}

TEST(RoundSequences, FillsTheStreamWithASegmentOfNoTokensOrTheLastSequence) {
  RoundOptions options;
  options.multiple = 4;
  options.cp = 2;
  options.stream_multiple = 16;
  RoundedStream stream = round_sequences(Longs{3, 6}, options);
  EXPECT_EQ(stream.cu_seqlens, (Ints{0, 3, 9, 9}));
  EXPECT_EQ(stream.cu_seqlens_padded, (Ints{0, 4, 12, 16}));
  EXPECT_EQ(stream.max_slots, 8);
  options.tail = Tail::keep;
  stream = round_sequences(Longs{3, 6}, options);
  EXPECT_EQ(stream.cu_seqlens, (Ints{0, 3, 9}));
  EXPECT_EQ(stream.cu_seqlens_padded, (Ints{0, 4, 16}));
  EXPECT_EQ(stream.max_slots, 12);
  options.stream_multiple = 1;
  options.stream_slots = 40;
  stream = round_sequences(Longs{3, 6}, options);
  EXPECT_EQ(stream.cu_seqlens_padded, (Ints{0, 4, 40}));
  EXPECT_EQ(stream.max_slots, 36);
  stream = round_sequences(Longs{}, options);
  EXPECT_EQ(stream.cu_seqlens, (Ints{0, 0}));
  EXPECT_EQ(stream.cu_seqlens_padded, (Ints{0, 40}));
  options.stream_slots = 12;
  EXPECT_EQ(round_sequences(Longs{3, 6}, options).cu_seqlens_padded, (Ints{0, 4, 12}));
}

TEST(RoundSequences, OneRankTakesAnyMultiple) {
  RoundOptions options;
  options.multiple = 3;
  EXPECT_EQ(round_sequences(Longs{4}, options).cu_seqlens_padded, (Ints{0, 6}));
}

TEST(RoundSequences, RejectsMultiplesThatCpAndTpCannotCut) {
  RoundOptions options;
  options.cp = 2;
  options.tp = 4;
  options.multiple = 24;
  expect_usage(
      "the multiple of sequence lengths 24 is not a positive multiple of 16 (2·cp·tp); the nearest "
      "are 16 and 32",
      [&] { round_sequences(Longs{3}, options); });
  options.multiple = 4;
  expect_usage(
      "the multiple of sequence lengths 4 is not a positive multiple of 16 (2·cp·tp); the least is "
      "16",
      [&] { round_sequences(Longs{3}, options); });
  options.multiple = 16;
  options.stream_multiple = 40;
  expect_usage(
      "the multiple of the stream 40 is not a positive multiple of 16 (2·cp·tp); the nearest are "
      "32 and 48",
      [&] { round_sequences(Longs{3}, options); });
  options.stream_slots = 32;
  expect_usage("the stream cannot have both a fixed length (32) and a multiple (40)",
               [&] { round_sequences(Longs{3}, options); });
  options.stream_multiple = 1;
  expect_usage("the sequences need 48 slots; a stream of 32 is too short, the least is 48", [&] {
    round_sequences(Longs{3, 17}, options);
  });
  options.stream_slots = 36;
  expect_usage(
      "the length of the stream 36 is not a positive multiple of 16 (2·cp·tp); the nearest are 32 "
      "and 48",
      [&] { round_sequences(Longs{3}, options); });
  options.tp = 0;
  expect_usage("tp must be at least 1, not 0", [&] { round_sequences(Longs{3}, options); });
}

TEST(RoundSequences, RejectsLengthsOutOfRangeByName) {
  RoundOptions options;
  expect_usage("sequence 1: length -4 is negative; the least is 0", [&] {
    round_sequences(Longs{3, -4}, options);
  });
  expect_usage(
      "segment 1: 2000000000 slots after slot 2000000000 exceed the int32 range of cu_seqlens; at "
      "most 147483647 fit",
      [&] {
        round_sequences(Longs{2'000'000'000, 2'000'000'000}, options);
      });
}

TEST(BroadcastPositions, OneRowServesAllAndNoneIsCounted) {
  EXPECT_EQ(broadcast_positions(Longs{5, 6, 7}, 2, 3), (Longs{5, 6, 7, 5, 6, 7}));
  EXPECT_EQ(broadcast_positions(Longs{0, 1, 2, 9, 8, 7}, 2, 3), (Longs{0, 1, 2, 9, 8, 7}));
  EXPECT_EQ(broadcast_positions({}, 2, 3), (Longs{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(broadcast_positions({}, 2, 0), Longs{});
  expect_usage("4 positions for 2 rows of 3 slots; 3 (one row for all) or 6 are needed", [] {
    broadcast_positions(Longs{1, 2, 3, 4}, 2, 3);
  });
}

}  // namespace GYRE_FILE
}  // namespace gyre
