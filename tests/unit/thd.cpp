// BSHD -> THD: boundaries, masks, tails, chunks, and what is rejected.

#include "packing/thd.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <functional>
#include <numeric>

#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_usage;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;
using Rows = std::vector<Longs>;

constexpr int64_t none = length_sentinel;

LengthTable table(const Rows& rows) {
  LengthTable t{std::ssize(rows), rows.empty() ? 0 : std::ssize(rows.front()), {}};
  for (const Longs& row : rows) t.cells.insert(t.cells.end(), row.begin(), row.end());
  return t;
}

/// Ids 1000, 1001, ..., labels one more, positions by slot of the row.
BshdBatch make_batch(int64_t rows, int64_t slots) {
  BshdBatch batch;
  batch.rows = rows;
  batch.slots = slots;
  TokenIds ids(static_cast<size_t>(rows * slots));
  std::iota(ids.begin(), ids.end(), 1000);
  PositionIds positions;
  for (const int64_t id : ids) {
    batch.labels.push_back(id + 1);
    positions.values.push_back((id - 1000) % slots);
  }
  batch.inputs = std::move(ids);
  batch.positions = std::move(positions);
  return batch;
}

BshdBatch make_batch(int64_t slots, const Rows& real, const Rows& padded) {
  BshdBatch batch = make_batch(std::ssize(real), slots);
  batch.seq_lens = table(real);
  batch.seq_lens_padded = table(padded);
  return batch;
}

/// '.' real, 'P' padding.
std::string drawn(const std::vector<uint8_t>& mask) {
  std::string text;
  for (const uint8_t pad : mask) text += pad ? 'P' : '.';
  return text;
}

ThdOptions with_tail(Tail tail, int64_t slot_multiple = 1) {
  ThdOptions options;
  options.tail = tail;
  options.slot_multiple = slot_multiple;
  return options;
}

struct Conversion {
  std::string name;
  int64_t slots;
  Rows real, padded;
  Ints cu;
  std::optional<Ints> cup;  // nullopt: equal, so not emitted
  int32_t max;
  std::string mask;
  bool absorbed = false;
  bool undeclared_tail = false;
};
std::ostream& operator<<(std::ostream& out, const Conversion& c) {
  return out << c.name;
}
class Conversions : public testing::TestWithParam<Conversion> {};

TEST_P(Conversions, GiveBoundariesWidestSegmentAndMask) {
  const Conversion& c = GetParam();
  ThdOptions options;
  options.allow_undeclared_tail = c.undeclared_tail;
  const ThdBatch thd = to_thd(make_batch(c.slots, c.real, c.padded), options);
  EXPECT_EQ(*thd.cu_seqlens, c.cu);
  EXPECT_EQ(thd.cu_seqlens_padded, c.cup);
  EXPECT_EQ(thd.max_seqlen, c.max);
  EXPECT_EQ(drawn(thd.padding_mask), c.mask);
  EXPECT_EQ(thd.absorbed, c.absorbed);
}

std::string times(int count, char mark) {
  return std::string(static_cast<size_t>(count), mark);
}

// clang-format off
const Conversion conversions[] = {
    // name, slots of a row, seq_lens, seq_lens_padded,
    //     cu_seqlens, cu_seqlens_padded, max_seqlen, mask[, absorbed[, undeclared tail]]
    {"PaddingBetween", 6, {{3, 2}, {6, none}}, {{4, 2}, {6, none}},
         {0, 3, 5, 11}, Ints{0, 4, 6, 12}, 6, "...P........"},
    {"SeveralPerRow", 6, {{3, 2}, {2, 3}}, {{4, 2}, {3, 3}},
         {0, 3, 5, 7, 10}, Ints{0, 4, 6, 9, 12}, 3, "...P....P..."},
    {"TailOfTheOnlyRow", 16, {{3, 3, 3}}, {{3, 3, 10}},
         {0, 3, 6, 16}, {}, 10, ".........PPPPPPP", true},
    {"UndeclaredTail", 6, {{3}}, {{3}},
         {0, 6}, {}, 6, "...PPP", true, true},
    {"TailsOfBothRows", 6, {{3}, {5}}, {{6}, {6}},
         {0, 3, 8}, Ints{0, 6, 12}, 5, "...PPP.....P"},
    {"TailOfTheLastRowOnly", 4, {{4}, {2}}, {{4}, {4}},
         {0, 4, 8}, {}, 4, "......PP", true},
    {"OneSegmentAlwaysAbsorbs", 8, {{7}}, {{8}},
         {0, 8}, {}, 8, ".......P", true},
    {"AlignedSlots", 16, {{8, 5}}, {{8, 8}},
         {0, 8, 16}, {}, 8, ".............PPP", true},
    {"ShortSegmentsWideTail", 1024, {{112, 112, 112, 112, 112, none, none, none, none}},
                                    {{112, 112, 112, 112, 576, none, none, none, none}},
         {0, 112, 224, 336, 448, 1024}, {}, 576, times(560, '.') + times(464, 'P'), true},
    {"FullRowShortTail", 1024, {{112, 112, 112, 112, 112, 112, 112, 112, 112}},
                               {{112, 112, 112, 112, 112, 112, 112, 112, 128}},
         {0, 112, 224, 336, 448, 560, 672, 784, 896, 1024}, {}, 128,
         times(1008, '.') + times(16, 'P'), true},
    {"EmptySegmentRepeatsItsBoundary", 6, {{3, 0, 3}}, {{3, 0, 3}},
         {0, 3, 3, 6}, {}, 3, "......"},
    {"SegmentOfNoTokensInSlots", 6, {{2, 0}, {6, none}}, {{2, 4}, {6, none}},
         {0, 2, 2, 8}, Ints{0, 2, 6, 12}, 6, "..PPPP......"},
    {"SentinelBeforeASegment", 4, {{none, 4}, {2, 2}}, {{none, 4}, {2, 2}},
         {0, 4, 6, 8}, {}, 4, "........"},
    {"OnlySentinels", 3, {{none, none}, {none, none}}, {{none, none}, {none, none}},
         {0}, {}, 0, "PPPPPP"},
    {"NoColumns", 2, {{}}, {{}},
         {0}, {}, 0, "PP"},
    {"PaddingRowsAtTheEndAreAbsorbed", 4, {{4}, {none}, {none}}, {{4}, {none}, {none}},
         {0, 12}, {}, 12, "....PPPPPPPP", true},
    {"PaddingRowBehindPaddingStaysUncovered", 4, {{1, 2}, {none, none}}, {{2, 2}, {none, none}},
         {0, 1, 3}, Ints{0, 2, 4}, 2, ".P..PPPP"},
    {"PaddingRowAsASegmentOfNoTokens", 4, {{0}, {4}}, {{4}, {4}},
         {0, 0, 4}, Ints{0, 4, 8}, 4, "PPPP...."},
    {"NothingAtAll", 0, {}, {},
         {0}, {}, 0, ""},
};
// clang-format on
INSTANTIATE_TEST_SUITE_P(Thd, Conversions, testing::ValuesIn(conversions),
                         [](const auto& row) { return row.param.name; });

TEST(ToThd, MovesNoToken) {
  const BshdBatch batch = make_batch(6, {{3, 2}, {6, none}}, {{4, 2}, {6, none}});
  const ThdBatch thd = to_thd(batch);
  EXPECT_EQ(thd.slots, 12);
  EXPECT_EQ(std::get<TokenIds>(thd.inputs), std::get<TokenIds>(batch.inputs));
  EXPECT_EQ(thd.labels, batch.labels);
  EXPECT_EQ(thd.positions->axes, 1);
  EXPECT_EQ(thd.positions->values, batch.positions->values);
}

TEST(ToThd, KeepsEmbeddingsAsFloatsAndAHiddenSizeOfOne) {
  for (const int64_t hidden : {1, 3}) {
    BshdBatch batch = make_batch(2, {{2}, {2}}, {{2}, {2}});
    std::vector<float> values;
    for (int64_t i = 0; i < 4 * hidden; ++i) values.push_back(0.25F + static_cast<float>(i));
    batch.inputs = TokenEmbeddings{hidden, values};
    const ThdBatch thd = to_thd(batch);
    const auto& embeddings = std::get<TokenEmbeddings>(thd.inputs);
    EXPECT_EQ(embeddings.hidden, hidden);
    EXPECT_EQ(embeddings.values, values);
    EXPECT_EQ(thd.padding_mask.size(), 4u);  // by slot, not by value
  }
}

TEST(ToThd, AbsentPositionsStayAbsent) {
  BshdBatch batch = make_batch(2, {{2}}, {{2}});
  batch.positions = std::nullopt;
  EXPECT_FALSE(to_thd(batch).positions);
}

TEST(ToThd, SentinelIsComparedForEquality) {
  ThdOptions options;
  options.sentinel = -999;
  const ThdBatch thd = to_thd(make_batch(6, {{3, 2}, {6, -999}}, {{4, 2}, {6, -999}}), options);
  EXPECT_EQ(*thd.cu_seqlens, (Ints{0, 3, 5, 11}));
  EXPECT_EQ(*thd.cu_seqlens_padded, (Ints{0, 4, 6, 12}));
  expect_usage(
      "row 1, segment 1: real length -1000 is negative and not the sentinel -999; the least is 0",
      [&] {
        to_thd(make_batch(6, {{3, 2}, {6, none}}, {{4, 2}, {6, none}}), options);
      });
}

TEST(ToThd, PassesExtrasOnWithoutCopying) {
  BshdBatch batch = make_batch(2, {{2}, {2}}, {{2}, {2}});
  batch.extras["name"] = make_extra<char>(std::vector<char>{'a', 'b', 'c'});
  batch.extras["weights"] =
      make_extra<float>(std::vector<float>{1, 2, 3, 4}, Extra::Aligned::slots);
  batch.extras["sources"] = make_extra<int32_t>(Ints{7, 8}, Extra::Aligned::rows);
  const ThdBatch thd = to_thd(batch);
  ASSERT_EQ(thd.extras.size(), 3u);
  for (const auto& [name, extra] : batch.extras)
    EXPECT_EQ(thd.extras.at(name).bytes, extra.bytes) << name;
}

TEST(ToThd, WithoutSlotLengthsRealOnesAreTheLayout) {
  BshdBatch batch = make_batch(4, {{3, 1}, {2, none}}, {});
  batch.seq_lens_padded = std::nullopt;
  expect_usage(
      "row 1: seq_lens sums to 2, but a row has 4 slots; a last slot length of 4 instead of 2 "
      "would fill it",
      [&] { to_thd(batch); });
  ThdOptions options;
  options.allow_undeclared_tail = true;
  const ThdBatch thd = to_thd(batch, options);
  EXPECT_EQ(*thd.cu_seqlens, (Ints{0, 3, 4, 6}));  // not absorbed: there was nothing to compare
  EXPECT_FALSE(thd.cu_seqlens_padded);
  EXPECT_FALSE(thd.absorbed);
  EXPECT_EQ(thd.max_seqlen, 3);
  EXPECT_EQ(drawn(thd.padding_mask), "......PP");
}

TEST(ToThd, TokensAreCountedByMaskAndLabelsNotByBoundaries) {
  BshdBatch batch = make_batch(8, {{5}}, {{8}});
  batch.labels = {1, ignored_label, 3, 4, ignored_label, ignored_label, -100, -100};
  const ThdBatch thd = to_thd(batch);
  EXPECT_EQ(thd.cu_seqlens->back(), 8);
  EXPECT_EQ(count_real_tokens(thd.padding_mask), 5);
  EXPECT_EQ(count_supervised_tokens(thd.labels), 3);
}

// Without seq_lens.

BshdBatch bare_batch(int64_t rows, const TokenIds& ids) {
  BshdBatch batch = make_batch(rows, std::ssize(ids) / rows);
  batch.inputs = ids;
  return batch;
}

TEST(PadIdFallback, AcceptsOneRunAtTheEndOfTheStream) {
  const ThdBatch thd = to_thd(bare_batch(2, {5, 6, 7, 8, 0, 0}));
  EXPECT_EQ(drawn(thd.padding_mask), "....PP");
  EXPECT_FALSE(thd.cu_seqlens);
  EXPECT_FALSE(thd.cu_seqlens_padded);
  EXPECT_FALSE(thd.max_seqlen);
  EXPECT_EQ(drawn(to_thd(bare_batch(1, {5, 6, 7})).padding_mask), "...");
  EXPECT_EQ(drawn(to_thd(bare_batch(1, {0, 0, 0})).padding_mask), "PPP");
  ThdOptions options;
  options.pad_id = 9;
  EXPECT_EQ(drawn(to_thd(bare_batch(1, {0, 5, 9}), options).padding_mask), "..P");
}

TEST(PadIdFallback, RejectsPadIdsAmongContent) {
  const auto refused = [](const std::string& place, const TokenIds& ids) {
    expect_usage(place +
                     " holds the pad id 0 before real tokens: without seq_lens padding is only "
                     "known at the end of the stream",
                 [&] { to_thd(bare_batch(2, ids)); });
  };
  refused("row 0, slot 2", {5, 6, 0, 7, 8, 0});
  refused("row 1, slot 0", {5, 6, 7, 0, 8, 9});
}

// What is rejected.

struct Rejection {
  std::string name;
  int64_t slots;
  Rows real, padded;
  std::string message;
  int64_t slot_multiple = 1;
  bool undeclared_tail = false;
};
std::ostream& operator<<(std::ostream& out, const Rejection& c) {
  return out << c.name;
}
class Rejections : public testing::TestWithParam<Rejection> {};

TEST_P(Rejections, NameRowSegmentAndWhatWouldDo) {
  const Rejection& c = GetParam();
  ThdOptions options = with_tail(Tail::keep, c.slot_multiple);
  options.allow_undeclared_tail = c.undeclared_tail;
  expect_usage(c.message, [&] { to_thd(make_batch(c.slots, c.real, c.padded), options); });
}

// clang-format off
const Rejection rejections[] = {
    // name, slots of a row, seq_lens, seq_lens_padded, message[, slot multiple[, undeclared tail]]
    {"RowThatIsNotFull", 6, {{4, none}, {2, 3}}, {{4, none}, {3, 3}},
     "row 0: seq_lens_padded sums to 4, but a row has 6 slots; a last slot length of 6 instead of "
     "4 would fill it"},
    {"RowThatIsNotFullBeforeOthers", 6, {{4, none}, {2, 3}}, {{4, none}, {3, 3}},
     "row 0: seq_lens_padded sums to 4, but a row has 6 slots; a last slot length of 6 instead of "
     "4 would fill it", 1, true},
    {"UndeclaredTail", 6, {{3}}, {{3}},
     "row 0: seq_lens_padded sums to 3, but a row has 6 slots; a last slot length of 6 instead of "
     "3 would fill it"},
    {"RowThatIsTooFull", 6, {{4, 1}}, {{4, 3}},
     "row 0: seq_lens_padded sums to 7, but a row has 6 slots; a last slot length of 2 instead of "
     "3 would fill it"},
    {"RowOfTooManyTokens", 6, {{6, none}, {4, 3}}, {{6, none}, {4, 3}},
     "row 1: seq_lens_padded sums to 7, but a row has 6 slots"},
    {"SegmentWiderThanTheRow", 6, {{6}, {5}}, {{6}, {7}},
     "row 1, segment 0: slot length 7 exceeds the row; at most 6 fit"},
    {"RealLongerThanSlots", 6, {{2, 5}}, {{2, 4}},
     "row 0, segment 1: real length 5 exceeds its slot length; at most 4 fit"},
    {"NegativeRealLength", 6, {{-1, 4}}, {{2, 4}},
     "row 0, segment 0: real length -1 is negative and not the sentinel -1000; the least is 0"},
    {"SentinelInRealOnly", 6, {{4, none}}, {{4, 2}},
     "row 0, segment 1: seq_lens is -1000 and seq_lens_padded 2; both or neither must be the "
     "sentinel -1000"},
    {"SentinelInPaddedOnly", 6, {{6, 0}}, {{6, none}},
     "row 0, segment 1: seq_lens is 0 and seq_lens_padded -1000; both or neither must be the "
     "sentinel -1000"},
    {"PaddingRowBeforeOthers", 4, {{4}, {none}, {4}}, {{4}, {none}, {4}},
     "row 1: it has no segment, but a row after it has one; declare it as one segment of real "
     "length 0 and slot length 4"},
    {"FirstBadRowComesFirst", 4, {{-2}, {-3}}, {{4}, {4}},
     "row 0, segment 0: real length -2 is negative and not the sentinel -1000; the least is 0"},
    {"SlotsThatAreNoMultiple", 12, {{7, none}, {4, 5}}, {{12, none}, {4, 8}},
     "row 1, segment 0: slot length 4 is not a multiple of 6 (2·cp); the next valid one is 6", 6},
    {"UndeclaredTailThatIsNoMultiple", 10, {{4}}, {{4}},
     "row 0: 6 slots after its last segment are not a multiple of 4 (2·cp); the next valid row "
     "width is 12", 4, true},
    {"TablesOfOtherShapes", 4, {{4}}, {{4, none}},
     "seq_lens has 1 columns and seq_lens_padded 2; they must be equal"},
};
// clang-format on
INSTANTIATE_TEST_SUITE_P(Thd, Rejections, testing::ValuesIn(rejections),
                         [](const auto& row) { return row.param.name; });

TEST(ToThd, RejectsStreamsBeyondInt32ByRow) {
  const std::string message =
      "row 1: its boundaries exceed the int32 range of cu_seqlens; at most 1 rows of 1500000000 "
      "slots fit";
  BshdBatch batch;
  batch.rows = 2;
  batch.slots = 1'500'000'000;
  batch.seq_lens = table({{batch.slots}, {batch.slots}});
  expect_usage(message, [&] { to_thd(batch); });
  batch.rows = int64_t{1} << 62;  // rows · slots would overflow int64
  batch.seq_lens.reset();
  expect_usage(message, [&] { to_thd(batch); });
}

TEST(ToThd, RejectsArraysOfTheWrongSize) {
  const BshdBatch good = make_batch(3, {{3}, {3}}, {{3}, {3}});
  const auto expect = [&](const std::string& message,
                          const std::function<void(BshdBatch&)>& damage) {
    BshdBatch batch = good;
    damage(batch);
    expect_usage(message, [&] { to_thd(batch); });
  };
  expect("input_ids holds 5 values; 2 rows of 3 slots need 6",
         [](BshdBatch& b) { std::get<TokenIds>(b.inputs).pop_back(); });
  expect("inputs_embeds of hidden size 2 holds 6 values; 2 rows of 3 slots need 12", [](auto& b) {
    b.inputs = TokenEmbeddings{2, std::vector<float>(6)};
  });
  expect("the hidden size of embeddings must be at least 1, not 0", [](BshdBatch& b) {
    b.inputs = TokenEmbeddings{0, {}};
  });
  expect("labels holds 0 values; 2 rows of 3 slots need 6", [](auto& b) { b.labels.clear(); });
  expect("position_ids of 2 axes holds 6 values; 2 rows of 3 slots need 12",
         [](BshdBatch& b) { b.positions->axes = 2; });
  expect("position_ids must have at least 1 axis, not 0",
         [](BshdBatch& b) { b.positions->axes = 0; });
  expect("seq_lens is [1, 1] and holds 1 cells; a batch of 2 rows needs 2 rows of cells",
         [](BshdBatch& b) { b.seq_lens = table({{3}}); });
  expect("seq_lens_padded is [2, 1] and holds 3 cells; a batch of 2 rows needs 2 rows of cells",
         [](BshdBatch& b) { b.seq_lens_padded->cells.push_back(3); });
  expect("seq_lens_padded is given without seq_lens: real lengths are unknown",
         [](BshdBatch& b) { b.seq_lens = std::nullopt; });
  expect("embeddings need seq_lens: padding cannot be told from their values", [](BshdBatch& b) {
    b.inputs = TokenEmbeddings{1, std::vector<float>(6)};
    b.seq_lens.reset();
    b.seq_lens_padded.reset();
  });
  expect("extra 'weights' holds 20 bytes; 6 items of 4 bytes need 24", [](BshdBatch& b) {
    b.extras["weights"] = make_extra<float>(std::vector<float>(5), Extra::Aligned::slots);
  });
  expect("a batch of -1 rows of 3 slots; neither may be negative",
         [](BshdBatch& b) { b.rows = -1; });
  expect_usage("slot_multiple must be at least 1, not 0",
               [&] { to_thd(good, with_tail(Tail::keep, 0)); });
}

// Tails.

TEST(Tail, OneSegmentInItsThreeForms) {
  const BshdBatch batch = make_batch(16, {{5}}, {{16}});
  const ThdBatch absorbed = to_thd(batch, with_tail(Tail::absorb, 4));
  EXPECT_EQ(*absorbed.cu_seqlens, (Ints{0, 16}));
  EXPECT_FALSE(absorbed.cu_seqlens_padded);
  EXPECT_EQ(absorbed.max_seqlen, 16);
  const ThdBatch own = to_thd(batch, with_tail(Tail::own_segment, 4));
  EXPECT_EQ(*own.cu_seqlens, (Ints{0, 5, 5}));
  EXPECT_EQ(*own.cu_seqlens_padded, (Ints{0, 8, 16}));
  EXPECT_EQ(own.max_seqlen, 5);
  EXPECT_FALSE(own.absorbed);
  const ThdBatch kept = to_thd(batch, with_tail(Tail::keep, 4));
  EXPECT_EQ(*kept.cu_seqlens, (Ints{0, 5}));
  EXPECT_EQ(*kept.cu_seqlens_padded, (Ints{0, 16}));
  EXPECT_FALSE(kept.absorbed);
  for (const ThdBatch* thd : {&absorbed, &own, &kept})
    EXPECT_EQ(drawn(thd->padding_mask), ".....PPPPPPPPPPP");
}

TEST(Tail, OwnSegmentOfEveryRow) {
  const BshdBatch batch = make_batch(12, {{3, 2}, {9, none}, {12, none}, {0, none}},
                                     {{4, 8}, {12, none}, {12, none}, {12, none}});
  const ThdBatch thd = to_thd(batch, with_tail(Tail::own_segment, 4));
  // Row 1 needs all of its slots, and row 3 is a segment of no tokens already.
  EXPECT_EQ(*thd.cu_seqlens, (Ints{0, 3, 5, 5, 14, 26, 26}));
  EXPECT_EQ(*thd.cu_seqlens_padded, (Ints{0, 4, 8, 12, 24, 36, 48}));
}

TEST(Tail, OwnSegmentCoversWhatRowsDoNot) {
  const ThdBatch rows = to_thd(make_batch(4, {{4}, {none}, {none}}, {{4}, {none}, {none}}),
                               with_tail(Tail::own_segment));
  EXPECT_EQ(*rows.cu_seqlens, (Ints{0, 4, 4}));
  EXPECT_EQ(*rows.cu_seqlens_padded, (Ints{0, 4, 12}));
  ThdOptions options = with_tail(Tail::own_segment);
  options.allow_undeclared_tail = true;
  const ThdBatch tail = to_thd(make_batch(6, {{3}}, {{3}}), options);
  EXPECT_EQ(*tail.cu_seqlens, (Ints{0, 3, 3}));
  EXPECT_EQ(*tail.cu_seqlens_padded, (Ints{0, 3, 6}));
}

TEST(Tail, FullRowsNeedNone) {
  const ThdBatch thd = to_thd(make_batch(8, {{4, 4}}, {{4, 4}}), with_tail(Tail::own_segment, 4));
  EXPECT_EQ(*thd.cu_seqlens, (Ints{0, 4, 8}));
  EXPECT_FALSE(thd.cu_seqlens_padded);
}

// Properties over random batches of 1, 2, 4, 8 rows and widths 32 .. 1024.

struct Drawn {
  BshdBatch batch;
  std::vector<uint8_t> mask;  // slot by slot
};

Drawn draw_batch(int64_t multiple) {
  const int64_t rows = int64_t{1} << *rc::gen::inRange(0, 4);
  const int64_t slots = int64_t{32} << *rc::gen::inRange(0, 6);
  const int64_t columns = *rc::gen::inRange<int64_t>(1, 7);
  Drawn drawn;
  Rows real, padded;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t segments = *rc::gen::inRange<int64_t>(1, columns + 1);
    Longs r, l;
    int64_t left = slots;
    for (int64_t i = 0; i < segments; ++i) {
      const int64_t length =
          i + 1 == segments ? left : multiple * *rc::gen::inRange<int64_t>(0, left / multiple + 1);
      l.push_back(length);
      // Often full, so that only the end differs and absorption is met.
      r.push_back(*rc::gen::inRange(0, 3) > 0 ? length : *rc::gen::inRange<int64_t>(0, length + 1));
      left -= length;
      for (int64_t k = 0; k < length; ++k) drawn.mask.push_back(k >= r.back());
    }
    r.resize(columns, none);
    l.resize(columns, none);
    real.push_back(r);
    padded.push_back(l);
  }
  drawn.batch = make_batch(slots, real, padded);
  return drawn;
}

TEST(ToThd, BoundariesAndMaskDescribeEverySlot) {
  int absorbed = 0, padded = 0;
  EXPECT_TRUE(rc::check("mask and boundaries agree with the tables", [&] {
    const int64_t multiple = *rc::gen::element<int64_t>(1, 2, 8);
    const Tail tail = *rc::gen::element(Tail::absorb, Tail::own_segment, Tail::keep);
    const Drawn drawn = draw_batch(multiple);
    const ThdBatch thd = to_thd(drawn.batch, with_tail(tail, multiple));
    RC_ASSERT(thd.padding_mask == drawn.mask);
    const SegmentBounds bounds = thd.bounds();
    check_bounds(bounds);
    RC_ASSERT(bounds.slots() == thd.slots);
    // In parentheses: RapidCheck's own operator|| evaluates both sides.
    RC_ASSERT((!thd.cu_seqlens_padded || *thd.cu_seqlens_padded != *thd.cu_seqlens));
    int64_t widest = 0, unlike = 0;
    for (int64_t i = 0; i < bounds.segments(); ++i) {
      widest = std::max(widest, bounds.real_length(i));
      RC_ASSERT(bounds.slot_length(i) % multiple == 0);
      for (int64_t k = 0; k < bounds.slot_length(i); ++k)
        unlike += (k >= bounds.real_length(i)) != (drawn.mask[bounds.begin(i) + k] != 0);
    }
    RC_ASSERT(*thd.max_seqlen == widest);
    RC_ASSERT(thd.absorbed == (unlike > 0));
    RC_ASSERT(!thd.absorbed || !thd.cu_seqlens_padded);
    RC_ASSERT(tail == Tail::absorb || !thd.absorbed);
    absorbed += thd.absorbed;
    padded += thd.cu_seqlens_padded.has_value();
  }));
  EXPECT_GT(absorbed, 0);
  EXPECT_GT(padded, 0);
}

// Chunks.

TEST(Chunks, BoundariesAreStackedWithSentinels) {
  const BshdBatch batch = make_batch(6, {{3, 2, 1}, {6, none, none}, {4, none, none}, {2, 3, none}},
                                     {{3, 2, 1}, {6, none, none}, {6, none, none}, {3, 3, none}});
  const std::vector<ThdBatch> chunks = split_into_chunks(batch, 2);
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_FALSE(chunks[0].cu_seqlens_padded);
  EXPECT_EQ(drawn(chunks[0].padding_mask), "............");
  EXPECT_EQ(drawn(chunks[1].padding_mask), "....PP..P...");
  EXPECT_EQ(std::get<TokenIds>(chunks[1].inputs).front(), 1012);
  EXPECT_EQ(chunks[1].labels.front(), 1013);
  const ChunkBounds bounds = stack_chunk_bounds(chunks);
  EXPECT_EQ(bounds.cu_seqlens.columns, 5);
  EXPECT_EQ(bounds.cu_seqlens.cells, (Ints{0, 3, 5, 6, 12, 0, 4, 6, 9, -1000}));
  ASSERT_TRUE(bounds.cu_seqlens_padded);
  EXPECT_EQ(bounds.cu_seqlens_padded->cells, (Ints{0, 3, 5, 6, 12, 0, 6, 9, 12, -1000}));
  EXPECT_EQ(bounds.max_seqlen, (Ints{6, 4}));
  const auto row = strip_sentinels(bounds.cu_seqlens.row(1));
  EXPECT_EQ(Ints(row.begin(), row.end()), (Ints{0, 4, 6, 9}));
}

TEST(Chunks, NoPaddedBoundariesIfNoChunkHasAny) {
  const auto chunks = split_into_chunks(make_batch(4, {{4}, {4}}, {{4}, {4}}), 2);
  EXPECT_FALSE(stack_chunk_bounds(chunks).cu_seqlens_padded);
  const auto custom = stack_chunk_bounds(
      split_into_chunks(make_batch(4, {{4, none}, {2, 2}}, {{4, none}, {2, 2}}), 2), -7);
  EXPECT_EQ(custom.cu_seqlens.cells, (Ints{0, 4, -7, 0, 2, 4}));
  const auto row = strip_sentinels(custom.cu_seqlens.row(0), -7);
  EXPECT_EQ(Ints(row.begin(), row.end()), (Ints{0, 4}));
}

TEST(Chunks, EachAbsorbsItsOwnTail) {
  // Tails on both rows: not absorbed together, but absorbed apart; the third row has none, the
  // fourth has padding in between.
  const BshdBatch batch = make_batch(6, {{3, none}, {5, none}, {6, none}, {1, 3}},
                                     {{6, none}, {6, none}, {6, none}, {2, 4}});
  EXPECT_FALSE(to_thd(batch).absorbed);
  const auto chunks = split_into_chunks(batch, 4);
  EXPECT_EQ(*chunks[0].cu_seqlens, (Ints{0, 6}));
  EXPECT_TRUE(chunks[0].absorbed);
  EXPECT_EQ(*chunks[1].cu_seqlens, (Ints{0, 6}));
  EXPECT_TRUE(chunks[1].absorbed);
  EXPECT_FALSE(chunks[2].absorbed);
  EXPECT_EQ(*chunks[3].cu_seqlens, (Ints{0, 1, 4}));
  EXPECT_EQ(*chunks[3].cu_seqlens_padded, (Ints{0, 2, 6}));
  const ChunkBounds bounds = stack_chunk_bounds(chunks);
  EXPECT_EQ(bounds.cu_seqlens_padded->cells,
            (Ints{0, 6, -1000, 0, 6, -1000, 0, 6, -1000, 0, 2, 6}));
  EXPECT_EQ(bounds.max_seqlen, (Ints{6, 6, 6, 3}));
}

TEST(Chunks, ConcatenateToTheWholeBatch) {
  EXPECT_TRUE(rc::check("chunks of 1, 2, 4, 8 hold the batch in order", [] {
    const BshdBatch batch = draw_batch(1).batch;
    const int64_t chunks = std::min(batch.rows, int64_t{1} << *rc::gen::inRange(0, 4));
    const ThdBatch whole = to_thd(batch, with_tail(Tail::keep));
    TokenIds ids;
    Longs labels, positions;
    std::vector<uint8_t> mask;
    Ints cu = {0}, cup = {0};
    for (const ThdBatch& chunk : split_into_chunks(batch, chunks, with_tail(Tail::keep))) {
      RC_ASSERT(chunk.slots == whole.slots / chunks);
      const auto append = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(ids, std::get<TokenIds>(chunk.inputs));
      append(labels, chunk.labels);
      append(positions, chunk.positions->values);
      append(mask, chunk.padding_mask);
      const SegmentBounds bounds = chunk.bounds();
      for (int64_t i = 0; i < bounds.segments(); ++i) {
        cu.push_back(cu.back() + static_cast<int32_t>(bounds.real_length(i)));
        cup.push_back(cup.back() + static_cast<int32_t>(bounds.slot_length(i)));
      }
    }
    RC_ASSERT(ids == std::get<TokenIds>(whole.inputs));
    RC_ASSERT(labels == whole.labels);
    RC_ASSERT(positions == whole.positions->values);
    RC_ASSERT(mask == whole.padding_mask);
    RC_ASSERT(cu == *whole.cu_seqlens);
    RC_ASSERT(cup == whole.cu_seqlens_padded.value_or(cu));
  }));
}

TEST(Chunks, CutEmbeddingsAxesOfPositionsAndExtrasByRows) {
  BshdBatch batch = make_batch(2, {{2}, {2}}, {{2}, {2}});
  batch.inputs = TokenEmbeddings{2, {0.5F, 1, 2, 3, 4.5F, 5, 6, 7}};
  batch.positions = PositionIds{3, {0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15}};
  batch.extras["name"] = make_extra<char>(std::vector<char>{'a'});
  batch.extras["weights"] =
      make_extra<int16_t>(std::vector<int16_t>{1, 2, 3, 4, 5, 6, 7, 8}, Extra::Aligned::slots, 2);
  batch.extras["sources"] = make_extra<int32_t>(Ints{7, 8}, Extra::Aligned::rows);
  const auto chunks = split_into_chunks(batch, 2);
  EXPECT_EQ(std::get<TokenEmbeddings>(chunks[1].inputs).values,
            (std::vector<float>{4.5F, 5, 6, 7}));
  EXPECT_EQ(chunks[1].positions->axes, 3);
  EXPECT_EQ(chunks[0].positions->values, (Longs{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(chunks[1].positions->values, (Longs{10, 11, 12, 13, 14, 15}));
  const Extras& extras = chunks[1].extras;
  EXPECT_EQ(extras.at("name").bytes, batch.extras.at("name").bytes);
  EXPECT_EQ(*extras.at("weights").bytes,
            *make_extra<int16_t>(std::vector<int16_t>{5, 6, 7, 8}).bytes);
  EXPECT_EQ(*extras.at("sources").bytes, *make_extra<int32_t>(Ints{8}).bytes);
}

TEST(Chunks, ConvertRowsWithoutLengthsByPadId) {
  const auto chunks = split_into_chunks(bare_batch(2, {5, 6, 0, 7, 8, 9}), 2);
  EXPECT_EQ(drawn(chunks[0].padding_mask), "..P");
  EXPECT_EQ(drawn(chunks[1].padding_mask), "...");
}

TEST(Chunks, RejectCountsThatLoseRows) {
  const auto split = [](int64_t rows, int64_t chunks) {
    return [=] { split_into_chunks(make_batch(rows, 2), chunks); };
  };
  expect_usage(
      "a batch of 5 rows cannot be cut into 2 equal chunks; the nearest counts are 1 and 5",
      split(5, 2));
  expect_usage(
      "a batch of 12 rows cannot be cut into 5 equal chunks; the nearest counts are 4 and 6",
      split(12, 5));
  expect_usage("a batch of 1 rows cannot be cut into 2 equal chunks; the most is 1", split(1, 2));
  expect_usage("the number of chunks must be at least 1, not 0", split(2, 0));
}

TEST(Chunks, NumberRowsInTheWholeBatch) {
  expect_usage(
      "row 3: seq_lens_padded sums to 2, but a row has 4 slots; a last slot length of 4 instead of "
      "2 would fill it",
      [] {
        split_into_chunks(make_batch(4, {{4}, {4}, {4}, {2}}, {{4}, {4}, {4}, {2}}), 2);
      });
  expect_usage(
      "row 2, slot 1 holds the pad id 0 before real tokens: without seq_lens padding is only known "
      "at the end of the stream",
      [] {
        split_into_chunks(bare_batch(4, {5, 6, 7, 8, 9, 0, 5, 6}), 2);
      });
}

}  // namespace GYRE_FILE
}  // namespace gyre
