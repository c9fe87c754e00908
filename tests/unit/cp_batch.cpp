// A rank's part of a packed batch: goldens, every layout, and what is rejected.

#include "packing/cp_batch.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "errors.hpp"
#include "packing/padding.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_usage;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

/// '.' real, 'P' padding.
std::string drawn(const std::vector<uint8_t>& mask) {
  std::string text;
  for (const uint8_t pad : mask) text += pad ? 'P' : '.';
  return text;
}

/// Rows of `slots` slots; ids 1000, 1001, ..., positions by segment.
BshdBatch make_batch(int64_t slots, const std::vector<Longs>& real,
                     const std::vector<Longs>& padded) {
  BshdBatch batch;
  batch.rows = std::ssize(real);
  batch.slots = slots;
  TokenIds ids(static_cast<size_t>(batch.rows * slots));
  std::iota(ids.begin(), ids.end(), 1000);
  for (const int64_t id : ids) batch.labels.push_back(id + 1);
  batch.inputs = std::move(ids);
  PositionIds positions;
  LengthTable lens{batch.rows, std::ssize(real.front()), {}}, slot_lens = lens;
  for (size_t row = 0; row < real.size(); ++row) {
    lens.cells.insert(lens.cells.end(), real[row].begin(), real[row].end());
    slot_lens.cells.insert(slot_lens.cells.end(), padded[row].begin(), padded[row].end());
    for (const int64_t length : padded[row])
      for (int64_t p = 0; p < length; ++p) positions.values.push_back(p);
  }
  positions.values.resize(batch.labels.size(), 0);
  batch.positions = std::move(positions);
  batch.seq_lens = std::move(lens);
  batch.seq_lens_padded = std::move(slot_lens);
  return batch;
}

CpOptions options_of(int cp, int rank) {
  CpOptions options;
  options.cp = cp;
  options.rank = rank;
  return options;
}

// 7 and 3 real tokens in 8 and 4 slots.
BshdBatch two_documents() {
  BshdBatch batch = make_batch(12, {{7, 3}}, {{8, 4}});
  batch.inputs = TokenIds{1, 2, 3, 4, 5, 6, 7, 0, 11, 12, 13, 0};
  batch.labels = {2, 3, 4, 5, 6, 7, -100, -100, 12, 13, -100, -100};
  return batch;
}

TEST(CpBatch, TwoDocumentsOnTwoRanks) {
  const auto check = [](int rank, const Ints& index, const TokenIds& ids, const Longs& labels,
                        const Longs& positions, const char* mask, const Ints& cu_seqlens) {
    SCOPED_TRACE(rank);
    const CpBatch batch = make_cp_batch(two_documents(), options_of(2, rank));
    EXPECT_EQ(batch.index, index);
    EXPECT_EQ(std::get<TokenIds>(batch.inputs), ids);
    EXPECT_EQ(batch.labels, labels);
    EXPECT_EQ(batch.positions.values, positions);
    EXPECT_EQ(drawn(batch.padding_mask), mask);
    ASSERT_TRUE(batch.local);
    EXPECT_EQ(batch.local->cu_seqlens, cu_seqlens);
    EXPECT_EQ(batch.local->cu_seqlens_padded, (Ints{0, 4, 6}));
    EXPECT_EQ(batch.qkv_format, "thd");
    EXPECT_EQ(batch.cp_size, 2);
    EXPECT_EQ(batch.cp_rank, rank);
    EXPECT_EQ(batch.cu_seqlens, (Ints{0, 7, 10}));
    EXPECT_EQ(batch.cu_seqlens_padded, (Ints{0, 8, 12}));
    EXPECT_EQ(batch.max_seqlen, 8);
    EXPECT_FALSE(batch.absorbed);
  };
  check(0, {0, 1, 6, 7, 8, 11}, {1, 2, 7, 0, 11, 0}, {2, 3, -100, -100, 12, -100},
        {0, 1, 6, 7, 0, 3}, "...P.P", {0, 3, 4});
  check(1, {2, 3, 4, 5, 9, 10}, {3, 4, 5, 6, 12, 13}, {4, 5, 6, 7, 13, -100}, {2, 3, 4, 5, 1, 2},
        "......", {0, 4, 6});
}

TEST(CpBatch, AbsorbsForOneRankOnly) {
  const BshdBatch batch = make_batch(16, {{8, 5}}, {{8, 8}});
  const CpBatch alone = make_cp_batch(batch, options_of(1, 0));
  EXPECT_EQ(alone.cu_seqlens, (Ints{0, 8, 16}));
  EXPECT_TRUE(alone.absorbed);
  for (const int cp : {2, 4}) {
    CpOptions options = options_of(cp, 0);
    const CpBatch shared = make_cp_batch(batch, options);
    EXPECT_EQ(shared.cu_seqlens, (Ints{0, 8, 13}));
    EXPECT_EQ(shared.cu_seqlens_padded, (Ints{0, 8, 16}));
    EXPECT_FALSE(shared.absorbed);
    options.tail = Tail::absorb;
    const CpBatch absorbed = make_cp_batch(batch, options);
    EXPECT_EQ(absorbed.cu_seqlens, (Ints{0, 8, 16}));
    EXPECT_EQ(absorbed.cu_seqlens_padded, (Ints{0, 8, 16}));
    EXPECT_TRUE(absorbed.absorbed);
    EXPECT_EQ(absorbed.padding_mask, shared.padding_mask);
  }
}

TEST(CpBatch, OneRankHoldsTheStreamInOrder) {
  // Neither width nor lengths are even: no chunks are cut.
  const BshdBatch batch = make_batch(7, {{2, 3}}, {{3, 4}});
  const CpBatch mine = make_cp_batch(batch, options_of(1, 0));
  Ints all(7);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(mine.index, all);
  EXPECT_EQ(std::get<TokenIds>(mine.inputs), std::get<TokenIds>(batch.inputs));
  EXPECT_EQ(mine.labels, batch.labels);
  EXPECT_EQ(mine.positions.values, batch.positions->values);
  EXPECT_EQ(drawn(mine.padding_mask), "..P...P");
  EXPECT_EQ(mine.cu_seqlens, (Ints{0, 2, 5}));
  EXPECT_EQ(mine.cu_seqlens_padded, (Ints{0, 3, 7}));
  EXPECT_EQ(mine.max_seqlen, 4);  // of slots, as under any cp
  EXPECT_EQ(mine.local->cu_seqlens, mine.cu_seqlens);
  EXPECT_EQ(mine.local->cu_seqlens_padded, mine.cu_seqlens_padded);
  EXPECT_EQ(mine.cp_size, 1);
  EXPECT_EQ(mine.cp_rank, 0);
}

TEST(CpBatch, EmbeddingsStayFloatsAndPositionsKeepTheirAxes) {
  BshdBatch batch = two_documents();
  TokenEmbeddings embeddings{2, {}};
  for (int i = 0; i < 24; ++i) embeddings.values.push_back(0.5F + static_cast<float>(i));
  batch.inputs = embeddings;
  PositionIds positions{3, {}};
  for (int64_t axis = 0; axis < 3; ++axis)
    for (int64_t t = 0; t < 12; ++t) positions.values.push_back(100 * axis + t);
  batch.positions = positions;
  const CpBatch r0 = make_cp_batch(batch, options_of(2, 0));
  const auto& mine = std::get<TokenEmbeddings>(r0.inputs);
  EXPECT_EQ(mine.hidden, 2);
  EXPECT_EQ(mine.values, (std::vector<float>{0.5F, 1.5F, 2.5F, 3.5F, 12.5F, 13.5F, 14.5F, 15.5F,
                                             16.5F, 17.5F, 22.5F, 23.5F}));
  EXPECT_EQ(r0.positions.axes, 3);
  EXPECT_EQ(r0.positions.values,
            (Longs{0, 1, 6, 7, 8, 11, 100, 101, 106, 107, 108, 111, 200, 201, 206, 207, 208, 211}));
}

TEST(CpBatch, PositionsAreThoseOfTheStreamNotOfTheShard) {
  const CpBatch r0 = make_cp_batch(make_batch(8, {{4, 4}}, {{4, 4}}), options_of(2, 0));
  EXPECT_EQ(r0.positions.values, (Longs{0, 3, 0, 3}));
  EXPECT_EQ(r0.index, (Ints{0, 3, 4, 7}));  // for a table indexed by slot of the stream
  EXPECT_EQ(packed_positions(r0.cu_seqlens_padded), (Longs{0, 1, 2, 3, 0, 1, 2, 3}));
}

TEST(CpBatch, TailAsASegmentOfItsOwnSpreadsRealTokens) {
  const BshdBatch batch = make_batch(128, {{16, 16, 5}}, {{16, 16, 96}});
  Longs own, absorbed;
  for (int rank = 0; rank < 4; ++rank) {
    CpOptions options = options_of(4, rank);
    const CpBatch mine = make_cp_batch(batch, options);
    EXPECT_EQ(mine.cu_seqlens, (Ints{0, 16, 32, 37, 37}));
    EXPECT_EQ(mine.cu_seqlens_padded, (Ints{0, 16, 32, 40, 128}));
    own.push_back(count_real_tokens(mine.padding_mask));
    EXPECT_EQ(mine.local->cu_seqlens.back(), own.back());
    options.tail = Tail::absorb;
    absorbed.push_back(count_real_tokens(make_cp_batch(batch, options).padding_mask));
  }
  EXPECT_EQ(own, (Longs{9, 9, 9, 10}));
  EXPECT_EQ(absorbed, (Longs{13, 8, 8, 8}));
}

TEST(CpBatch, PaddingRowsAreSharedToo) {
  const BshdBatch batch = make_batch(4, {{3}, {-1000}}, {{4}, {-1000}});
  const CpBatch r1 = make_cp_batch(batch, options_of(2, 1));
  EXPECT_EQ(r1.cu_seqlens, (Ints{0, 3, 3}));
  EXPECT_EQ(r1.cu_seqlens_padded, (Ints{0, 4, 8}));
  EXPECT_EQ(r1.index, (Ints{1, 2, 5, 6}));
  EXPECT_EQ(drawn(r1.padding_mask), "..PP");
  const BshdBatch empty = make_batch(4, {{-1000}}, {{-1000}});
  EXPECT_EQ(make_cp_batch(empty, options_of(2, 1)).index, (Ints{1, 2}));
}

TEST(CpBatch, ExtrasAreShardedByTheirAlignment) {
  BshdBatch batch = two_documents();
  batch.extras["name"] = make_extra<char>(std::vector<char>{'a'});
  batch.extras["sources"] = make_extra<int32_t>(Ints{5}, Extra::Aligned::rows);
  batch.extras["pairs"] =
      make_extra<int16_t>(std::vector<int16_t>{0, 100, 1, 101, 2, 102, 3, 103, 4,  104, 5,  105,
                                               6, 106, 7, 107, 8, 108, 9, 109, 10, 110, 11, 111},
                          Extra::Aligned::slots, 2);
  batch.extras["attention_mask"] =
      make_extra<uint8_t>(std::vector<uint8_t>(12, 1), Extra::Aligned::slots);
  const CpBatch r0 = make_cp_batch(batch, options_of(2, 0));
  EXPECT_EQ(r0.extras.size(), 3u);
  EXPECT_EQ(r0.extras.count("attention_mask"), 0u);
  EXPECT_EQ(r0.extras.at("name").bytes, batch.extras.at("name").bytes);
  EXPECT_EQ(r0.extras.at("sources").bytes, batch.extras.at("sources").bytes);
  EXPECT_EQ(
      *r0.extras.at("pairs").bytes,
      *make_extra<int16_t>(std::vector<int16_t>{0, 100, 1, 101, 6, 106, 7, 107, 8, 108, 11, 111})
           .bytes);
  const CpBatch alone = make_cp_batch(batch, options_of(1, 0));
  for (const auto& [name, extra] : batch.extras)
    EXPECT_EQ(alone.extras.at(name).bytes, extra.bytes) << name;
}

TEST(CpBatch, AppendedSlotsArePadding) {
  // 6 slots over 4 ranks: the contiguous layout appends two, which are all that rank 3 holds.
  CpOptions options = options_of(4, 3);
  options.layout = "contiguous";
  options.pad_id = 9;
  BshdBatch batch = make_batch(6, {{6}}, {{6}});
  batch.extras["loss_weights"] =
      make_extra<uint8_t>(std::vector<uint8_t>(6, 1), Extra::Aligned::slots);
  const CpBatch mine = make_cp_batch(batch, options);
  EXPECT_EQ(std::get<TokenIds>(mine.inputs), (TokenIds{9, 9}));
  EXPECT_EQ(mine.labels, (Longs{-100, -100}));
  EXPECT_EQ(mine.positions.values, (Longs{0, 0}));
  EXPECT_EQ(drawn(mine.padding_mask), "PP");
  EXPECT_EQ(*mine.extras.at("loss_weights").bytes, (std::vector<std::byte>(2)));
  EXPECT_EQ(mine.local->cu_seqlens_padded, (Ints{0, 0}));
  batch.inputs = TokenEmbeddings{1, std::vector<float>(6, 1.5F)};
  EXPECT_EQ(std::get<TokenEmbeddings>(make_cp_batch(batch, options).inputs).values,
            (std::vector<float>{0, 0}));
}

TEST(CpBatch, ShardsOfEveryLayoutAreTheStream) {
  EXPECT_TRUE(rc::check("every slot is on one rank, with all that belongs to it", [] {
    const LayoutKind kind = *rc::gen::elementOf(layout_kinds());
    const int cp = *rc::gen::inRange(2, 9);
    const int64_t multiple = kind.segment_multiple(cp);
    Longs real, padded;
    for (int64_t i = 0, n = *rc::gen::inRange<int64_t>(1, 6); i < n; ++i) {
      padded.push_back(multiple * *rc::gen::inRange<int64_t>(0, 12));
      real.push_back(*rc::gen::inRange<int64_t>(0, padded.back() + 1));
    }
    const int64_t slots = std::accumulate(padded.begin(), padded.end(), int64_t{0});
    const BshdBatch batch = make_batch(slots, {real}, {padded});
    const CpBatch whole = make_cp_batch(batch, options_of(1, 0));
    CpOptions options = options_of(cp, 0);
    options.layout = kind.name;
    options.layout_options.chunk = 3;
    options.tail = Tail::keep;
    std::vector<int> seen(slots, 0);
    int64_t tokens = 0;
    for (options.rank = 0; options.rank < cp; ++options.rank) {
      const CpBatch mine = make_cp_batch(batch, options);
      const auto& ids = std::get<TokenIds>(mine.inputs);
      for (size_t t = 0; t < mine.index.size(); ++t) {
        const auto slot = static_cast<size_t>(mine.index[t]);
        const bool appended = mine.index[t] >= slots;
        if (!appended) ++seen[slot];
        RC_ASSERT(ids[t] == (appended ? 0 : std::get<TokenIds>(whole.inputs)[slot]));
        RC_ASSERT(mine.labels[t] == (appended ? -100 : whole.labels[slot]));
        RC_ASSERT(mine.positions.values[t] == (appended ? 0 : whole.positions.values[slot]));
        RC_ASSERT(mine.padding_mask[t] == (appended ? 1 : whole.padding_mask[slot]));
      }
      tokens += count_real_tokens(mine.padding_mask);
      if (mine.local) {
        check_bounds(mine.local->view());
        RC_ASSERT(mine.local->cu_seqlens.back() == count_real_tokens(mine.padding_mask));
      }
      RC_ASSERT(kind.name != "dual-chunk-swap" || mine.local.has_value());
    }
    RC_ASSERT(std::count(seen.begin(), seen.end(), 1) == slots);
    RC_ASSERT(tokens == std::accumulate(real.begin(), real.end(), int64_t{0}));
  }));
}

// Local boundaries.

/// Local real lengths of one segment under dual-chunk-swap, rank by rank.
Longs local_lengths(int32_t real, int32_t slots, int cp) {
  const Ints cu = {0, real}, cup = {0, slots};
  const SegmentBounds bounds{cu, cup};
  const Layout layout = dual_chunk_swap(bounds, cp);
  Longs lengths;
  for (int rank = 0; rank < cp; ++rank) {
    const auto local = local_bounds(bounds, shard_index(layout, rank));
    EXPECT_TRUE(local);
    EXPECT_EQ(local->cu_seqlens_padded, (Ints{0, slots / cp}));
    lengths.push_back(local->cu_seqlens.back());
  }
  return lengths;
}

TEST(LocalBounds, RealLengthsAreCountedNotDivided) {
  EXPECT_EQ(local_lengths(7, 8, 2), (Longs{3, 4}));
  EXPECT_EQ(local_lengths(9, 12, 2), (Longs{3, 6}));
  EXPECT_EQ(local_lengths(8, 12, 2), (Longs{3, 5}));
  EXPECT_EQ(local_lengths(5, 8, 2), (Longs{2, 3}));
  EXPECT_EQ(local_lengths(1, 8, 2), (Longs{1, 0}));
  EXPECT_EQ(local_lengths(3, 8, 4), (Longs{1, 1, 1, 0}));
  EXPECT_EQ(local_lengths(698, 704, 4), (Longs{170, 176, 176, 176}));
}

TEST(LocalBounds, AreTheClampedHalves) {
  for (int cp = 1; cp <= 5; ++cp)
    for (int32_t chunk = 0; chunk <= 4; ++chunk)
      for (int32_t real = 0; real <= 2 * cp * chunk; ++real) {
        const Longs lengths = local_lengths(real, 2 * cp * chunk, cp);
        for (int32_t r = 0; r < cp; ++r)
          EXPECT_EQ(lengths[r], std::clamp(real - r * chunk, 0, chunk) +
                                    std::clamp(real - (2 * cp - 1 - r) * chunk, 0, chunk))
              << real << " of " << 2 * cp * chunk << " on rank " << r << " of " << cp;
      }
}

TEST(LocalBounds, ExistIfSegmentsAreRunsWithTheirTokensFirst) {
  const Ints cu = {0, 3, 9}, cup = {0, 4, 12};
  const SegmentBounds bounds{cu, cup};
  const auto of = [&](const std::string& layout, int rank) {
    LayoutOptions options;
    options.cp = 2;
    return local_bounds(bounds, shard_index(find_layout(layout).make(bounds, options), rank));
  };
  const auto contiguous = of("contiguous", 0);
  ASSERT_TRUE(contiguous);
  EXPECT_EQ(contiguous->cu_seqlens, (Ints{0, 3, 5}));
  EXPECT_EQ(contiguous->cu_seqlens_padded, (Ints{0, 4, 6}));
  const auto striped = of("striped", 1);
  ASSERT_TRUE(striped);
  EXPECT_EQ(striped->cu_seqlens, (Ints{0, 1, 4}));
  EXPECT_EQ(striped->cu_seqlens_padded, (Ints{0, 2, 6}));
  // Tokens behind padding, segments out of order, slots of the stream behind appended ones.
  EXPECT_FALSE(local_bounds(bounds, Ints{3, 0}));
  EXPECT_FALSE(local_bounds(bounds, Ints{4, 0}));
  EXPECT_FALSE(local_bounds(bounds, Ints{0, 12, 1}));
  const auto appended = local_bounds(bounds, Ints{0, 3, 4, 12, 13});
  ASSERT_TRUE(appended);
  EXPECT_EQ(appended->cu_seqlens_padded, (Ints{0, 2, 3}));
  EXPECT_EQ(appended->cu_seqlens, (Ints{0, 1, 2}));
}

// Chunks.

TEST(CpChunks, AreThePartsOfTheirRows) {
  const BshdBatch batch = make_batch(8, {{3, 2}, {8, -1000}, {7, -1000}, {4, 4}},
                                     {{4, 4}, {8, -1000}, {8, -1000}, {4, 4}});
  const BshdBatch lower = [&] {
    BshdBatch rows = make_batch(8, {{7, -1000}, {4, 4}}, {{8, -1000}, {4, 4}});
    for (int64_t& id : std::get<TokenIds>(rows.inputs)) id += 16;
    return rows;
  }();
  for (int rank = 0; rank < 2; ++rank) {
    const auto chunks = make_cp_chunks(batch, 2, options_of(2, rank));
    ASSERT_EQ(chunks.size(), 2u);
    EXPECT_EQ(chunks[0].cu_seqlens, (Ints{0, 3, 5, 13}));
    EXPECT_EQ(chunks[0].cu_seqlens_padded, (Ints{0, 4, 8, 16}));
    const CpBatch alone = make_cp_batch(lower, options_of(2, rank));
    EXPECT_EQ(chunks[1].index, alone.index);
    EXPECT_EQ(std::get<TokenIds>(chunks[1].inputs), std::get<TokenIds>(alone.inputs));
    EXPECT_EQ(chunks[1].positions.values, alone.positions.values);
    EXPECT_EQ(chunks[1].cu_seqlens, (Ints{0, 7, 11, 15}));
    EXPECT_EQ(chunks[1].cu_seqlens_padded, (Ints{0, 8, 12, 16}));
    EXPECT_EQ(chunks[1].local->cu_seqlens, alone.local->cu_seqlens);
    EXPECT_EQ(chunks[1].cp_rank, rank);
    for (const CpBatch& chunk : chunks) EXPECT_EQ(chunk.labels.size(), 8u);
  }
}

TEST(CpChunks, AbsorbApartForOneRank) {
  const BshdBatch batch = make_batch(4, {{3}, {4}, {2}, {1}}, {{4}, {4}, {4}, {4}});
  const auto chunks = make_cp_chunks(batch, 4, options_of(1, 0));
  ASSERT_EQ(chunks.size(), 4u);
  const std::vector<bool> absorbed = {true, false, true, true};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(chunks[i].absorbed, absorbed[i]);
    EXPECT_EQ(chunks[i].cu_seqlens, (Ints{0, 4}));
  }
  EXPECT_EQ(drawn(chunks[2].padding_mask), "..PP");
}

TEST(CpChunks, RejectWhatMakeCpBatchAndSplittingReject) {
  const BshdBatch batch = make_batch(8, {{8}, {8}, {8}}, {{8}, {8}, {8}});
  expect_usage(
      "a batch of 3 rows cannot be cut into 2 equal chunks; the nearest counts are 1 and 3",
      [&] { make_cp_chunks(batch, 2, options_of(2, 0)); });
  expect_usage("rank 2 of cp 2; ranks are 0 to 1",
               [&] { make_cp_chunks(batch, 3, options_of(2, 2)); });
}

// What is rejected.

TEST(CpBatch, RejectsOtherFormatsBeforeAnythingElse) {
  for (const std::string format : {"bshd", "sbhd", "THD", ""}) {
    CpOptions options = options_of(0, -3);
    options.qkv_format = format;
    expect_usage(
        "qkv_format '" + format + "' cannot be cut for context parallelism; only 'thd' can",
        [&] { make_cp_batch({}, options); });
  }
}

TEST(CpBatch, RejectsMissingKeysByName) {
  const auto expect_missing = [](const std::string& key, const auto& drop) {
    BshdBatch batch = two_documents();
    drop(batch);
    for (const int cp : {1, 2})
      expect_usage("the batch has no " + key + "; packed context parallelism needs it",
                   [&] { make_cp_batch(batch, options_of(cp, 0)); });
  };
  expect_missing("seq_lens", [](BshdBatch& batch) { batch.seq_lens.reset(); });
  expect_missing("seq_lens_padded", [](BshdBatch& batch) { batch.seq_lens_padded.reset(); });
  expect_missing("position_ids", [](BshdBatch& batch) { batch.positions.reset(); });
}

TEST(CpBatch, RejectsSlotLengthsThatAreNoMultipleOfTwoChunksARank) {
  // 6 + 6: the total is a multiple of 4, the segments are not.
  expect_usage(
      "row 0, segment 0: slot length 6 is not a multiple of 4 (2·cp); the next valid one is 8", [] {
        make_cp_batch(make_batch(12, {{6, 6}}, {{6, 6}}), options_of(2, 0));
      });
  // 5 + 7: the upstream index formula gives a permutation, split at the wrong slot.
  expect_usage(
      "row 1, segment 0: slot length 5 is not a multiple of 4 (2·cp); the next valid one is 8", [] {
        make_cp_batch(make_batch(12, {{12, -1000}, {5, 7}}, {{12, -1000}, {5, 7}}),
                      options_of(2, 0));
      });
  // Other layouts take any boundaries.
  CpOptions options = options_of(2, 0);
  options.layout = "zigzag";
  EXPECT_EQ(make_cp_batch(make_batch(12, {{5, 7}}, {{5, 7}}), options).index,
            (Ints{0, 1, 2, 9, 10, 11}));
}

TEST(CpBatch, RejectsRanksLayoutsAndUncoveredSlots) {
  for (const auto& [cp, rank, message] : {std::tuple{0, 0, "cp must be at least 1, not 0"},
                                          {2, 2, "rank 2 of cp 2; ranks are 0 to 1"},
                                          {2, -1, "rank -1 of cp 2; ranks are 0 to 1"}})
    expect_usage(message, [&, cp = cp, rank = rank] {
      make_cp_batch(two_documents(), options_of(cp, rank));
    });
  CpOptions options = options_of(2, 0);
  options.tail = Tail::keep;
  expect_usage(
      "the boundaries end at slot 4 of 8; make the slots behind them a segment of real length 0 "
      "(Tail::own_segment)",
      [&] {
        make_cp_batch(make_batch(4, {{3}, {-1000}}, {{4}, {-1000}}), options);
      });
}

TEST(ShardThd, RejectsStreamsThatDoNotFitTheLayout) {
  BshdBatch bare = two_documents();
  bare.seq_lens.reset();
  bare.seq_lens_padded.reset();
  bare.inputs = TokenIds(12, 5);
  const Ints short_bounds = {0, 8};
  const Layout layout = dual_chunk_swap({short_bounds, short_bounds}, 2);
  expect_usage("the stream has no boundaries (seq_lens); sharding needs them",
               [&] { shard_thd(to_thd(bare), layout, 0); });
  expect_usage("the layout is one of 8 slots, the stream has 12",
               [&] { shard_thd(to_thd(two_documents()), layout, 0); });
  BshdBatch unplaced = two_documents();
  unplaced.positions.reset();
  expect_usage("the stream has no position_ids; sharding needs them",
               [&] { shard_thd(to_thd(unplaced), layout, 0); });
}

// Rotary tables.

TEST(RopeSlices, AreThePositionsOfTheShard) {
  for (int cp = 1; cp <= 5; ++cp)
    for (int32_t local = 0; local <= 8; local += 2) {
      const Ints bounds = {0, local * cp};
      const Layout layout = dual_chunk_swap({bounds, bounds}, cp);
      for (int rank = 0; rank < cp; ++rank) {
        Ints positions;
        for (const PositionRange& slice : rope_slices(local, cp, rank))
          for (int64_t p = slice.begin; p < slice.end; ++p)
            positions.push_back(static_cast<int32_t>(p));
        EXPECT_EQ(positions, shard_index(layout, rank)) << local << " on " << rank << " of " << cp;
      }
    }
  EXPECT_EQ(rope_slices(4, 4, 1), (std::array<PositionRange, 2>{{{2, 4}, {12, 14}}}));
}

TEST(RopeSlices, RejectWhatIsNotTwoChunks) {
  expect_usage("a rank's 3 slots of a segment are not two equal chunks; the nearest are 2 and 4",
               [] { rope_slices(3, 2, 0); });
  expect_usage("a rank cannot have -2 slots of a segment; the least is 0",
               [] { rope_slices(-2, 2, 0); });
  expect_usage("rank 2 of cp 2; ranks are 0 to 1", [] { rope_slices(4, 2, 2); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
