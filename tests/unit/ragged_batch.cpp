// Rectangles as ragged batches: every visible pair once, and nothing else.

#include "attention/kernels/ragged_batch.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <bit>
#include <map>
#include <set>

#include "attention/kernels/joined.hpp"
#include "attention/kernels/reversed_rows.hpp"
#include "attention/kernels/staircase.hpp"
#include "layout_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using Pairs = std::map<std::pair<int64_t, int64_t>, int>;

constexpr int64_t no_limit = int64_t{1} << 40;

void count(Pairs& pairs, const Rectangle& r) {
  for (int64_t i = 0; i < r.q_length; ++i) {
    const int64_t end = std::min(r.k_length, r.mask.end_key(i));
    for (int64_t j = std::max<int64_t>(0, r.mask.begin_key(i)); j < end; ++j)
      ++pairs[{r.q_begin + i, r.k_begin + j}];
  }
}

/// By the definition of the masks.
void count(Pairs& pairs, const RaggedBatch& batch, const RaggedEntry& e) {
  for (int64_t i = 0; i < e.q_length; ++i)
    for (int64_t j = 0; j < e.k_length; ++j) {
      const int64_t end = i + (batch.mask == RaggedMask::causal_end ? e.k_length - e.q_length : 0);
      const bool inside = j <= end && (batch.window == 0 || j > end - batch.window);
      if (batch.mask == RaggedMask::full || inside) ++pairs[{e.q_begin + i, e.k_begin + j}];
    }
}

Pairs pairs_of(const RaggedPlan& plan) {
  Pairs pairs;
  for (const RaggedBatch& batch : plan.batches)
    for (const RaggedEntry& e : batch.entries) count(pairs, batch, e);
  for (const Rectangle& r : plan.inverse) count(pairs, r);
  for (const Rectangle& r : plan.others) count(pairs, r);
  return pairs;
}

Pairs pairs_of(std::span<const Rectangle> rectangles) {
  Pairs pairs;
  for (const Rectangle& r : rectangles) count(pairs, r);
  return pairs;
}

Rectangle arbitrary_rectangle(int64_t row) {
  const auto stride = [] { return *rc::gen::inRange<int64_t>(1, 4); };
  return {row,
          *rc::gen::inRange<int64_t>(0, 12),
          row / 2,
          *rc::gen::inRange<int64_t>(0, 12),
          {*rc::gen::arbitrary<bool>(), *rc::gen::inRange<int64_t>(-20, 20), stride(), stride(),
           *rc::gen::weightedOneOf<int64_t>(
               {{3, rc::gen::just<int64_t>(0)}, {1, rc::gen::inRange<int64_t>(1, 30)}})}};
}

/// Steps of adjacent queries from `row` on that see keys from `key` on, each more than the last.
std::vector<Rectangle> staircase(int64_t row, int64_t key, std::span<const int64_t> lengths) {
  std::vector<Rectangle> steps;
  int64_t begin = row, keys = 0;
  for (const int64_t length : lengths) {
    keys += length;
    steps.push_back({begin, length, key, keys, {}});
    begin += length;
  }
  return steps;
}

std::vector<Rectangle> arbitrary_rectangles() {
  std::vector<Rectangle> rectangles = staircase(
      *rc::gen::inRange(0, 9), *rc::gen::inRange(0, 9),
      *rc::gen::resize(12, rc::gen::container<std::vector<int64_t>>(rc::gen::inRange(1, 5))));
  const int count = *rc::gen::inRange(0, 9);
  for (int i = 0; i < count; ++i) rectangles.push_back(arbitrary_rectangle(4 * i));
  return rectangles;
}

TEST(RaggedPlan, HasEveryVisiblePairOnceAndNoOther) {
  EXPECT_TRUE(rc::check("pairs", [] {
    const std::vector<Rectangle> rectangles = arbitrary_rectangles();
    const RaggedPlan plan = plan_ragged(
        rectangles, *rc::gen::element(false, false, true), *rc::gen::inRange<int64_t>(1, 6),
        *rc::gen::inRange<int64_t>(1, 40), *rc::gen::inRange<int64_t>(0, 9));
    RC_ASSERT(pairs_of(plan) == pairs_of(rectangles));
  }));
}

TEST(Joined, ChunksOfKeysAndOfQueries) {
  // 4 chunks of queries against 4 chunks of keys, of which the third lies elsewhere.
  std::vector<Rectangle> chunks;
  for (int64_t q = 0; q < 4; ++q)
    for (const int64_t k : {0, 1, 7, 3}) chunks.push_back({8 * q, 8, 8 * k, 8, {}});
  EXPECT_EQ(joined(chunks),
            (std::vector<Rectangle>{{0, 32, 0, 16, {}}, {0, 32, 24, 8, {}}, {0, 32, 56, 8, {}}}));
  chunks.erase(chunks.begin() + 4);  // queries 8 to 15 do not see the first keys
  EXPECT_EQ(joined(chunks).size(), 5U);
  EXPECT_EQ(pairs_of(joined(chunks)), pairs_of(chunks));
}

TEST(Joined, APrefixAndTheDiagonalBehindItsKeys) {
  const Rectangle prefix{0, 12, 0, 16, {}};
  // In positions of every second token.
  const Rectangle behind{2, 8, 16, 8, {true, -3, 2, 2}}, late{2, 8, 16, 8, {true, -1, 2, 2}};
  EXPECT_EQ(joined_prefixes(std::vector{prefix, late}),
            (std::vector<Rectangle>{
                {0, 2, 0, 16, {}}, {2, 8, 0, 24, {true, 31, 2, 2}}, {10, 2, 0, 16, {}}}));
  EXPECT_EQ(joined_prefixes(std::vector{prefix, behind}), (std::vector{prefix, behind}))
      << "the first query would not see key 15";
  const Rectangle other{10, 2, 16, 2, {true, 0}};
  EXPECT_EQ(joined_prefixes(std::vector{prefix, late, other}), (std::vector{prefix, late, other}))
      << "two diagonals would share keys";
  const Rectangle wider{10, 3, 16, 3, {true, 0}};  // its last query does not see the prefix
  EXPECT_EQ(joined_prefixes(std::vector{prefix, wider}), (std::vector{prefix, wider}));
  const Rectangle ahead{2, 8, 16, 8, {true, 0}}, later{3, 9, 0, 16, {}};  // its first query neither
  EXPECT_EQ(joined_prefixes(std::vector{ahead, later}), (std::vector{ahead, later}));
}

TEST(Joined, KeepsPairs) {
  EXPECT_TRUE(rc::check("pairs", [] {
    std::vector<Rectangle> rectangles = arbitrary_rectangles();
    for (int i = *rc::gen::inRange(0, 12); i > 0; --i) {
      Rectangle r{*rc::gen::element<int64_t>(0, 3),
                  *rc::gen::element<int64_t>(3, 5),
                  *rc::gen::element<int64_t>(100, 104, 107),
                  4,
                  {}};
      if (*rc::gen::arbitrary<bool>()) {
        const int64_t stride = *rc::gen::inRange<int64_t>(1, 3);
        r.mask = {true, *rc::gen::inRange<int64_t>(-4, 8), stride, stride,
                  *rc::gen::element<int64_t>(0, 0, 5)};
      }
      rectangles.push_back(r);
    }
    RC_ASSERT(pairs_of(joined(rectangles)) == pairs_of(rectangles));
    RC_ASSERT(pairs_of(joined_prefixes(rectangles)) == pairs_of(rectangles));
  }));
}

/// The row of each scratch row.
std::map<int64_t, int64_t> rows_of(const Round& round) {
  std::map<int64_t, int64_t> rows;
  for (const RowPiece& p : round)
    for (int64_t i = 0; i < p.length; ++i)
      if (!rows.emplace(p.scratch + i * p.step, p.row + i).second) ADD_FAILURE() << p.scratch + i;
  return rows;
}

TEST(ReversedRows, HaveEveryVisiblePairOnceWithoutGaps) {
  EXPECT_TRUE(rc::check("pairs", [] {
    std::vector<Rectangle> inverse;
    for (int i = *rc::gen::inRange(0, 6); i > 0; --i) {
      Rectangle r = arbitrary_rectangle(*rc::gen::inRange(0, 40));
      r.mask.causal = false;
      r.mask.k_stride = r.mask.q_stride;
      r.mask.window = std::max<int64_t>(1, r.mask.window);
      if (r.q_length > 0 && r.k_length > 0) inverse.push_back(r);
    }
    const ReversedRows reversed = reversed_rows(inverse);
    const std::map<int64_t, int64_t> queries = rows_of(reversed.queries),
                                     keys = rows_of(reversed.keys);
    RC_ASSERT(std::ssize(queries) == reversed.q_rows);
    RC_ASSERT(std::ssize(keys) == reversed.k_rows);
    RC_ASSERT((queries.empty() || queries.rbegin()->first == reversed.q_rows - 1));
    Pairs pairs;
    for (const auto& [pair, times] : pairs_of(reversed.rectangles))
      pairs[{queries.at(pair.first), keys.at(pair.second)}] += times;
    RC_ASSERT(pairs == pairs_of(inverse));
    for (const Round& round : {reversed.queries, reversed.keys})
      RC_ASSERT(exchanged(exchanged(round)) == round);
    const auto read = rows_of(exchanged(reversed.queries));
    for (const auto& [scratch, row] : queries) RC_ASSERT(read.at(row) == scratch);
  }));
}

TEST(ReversedRows, AreOfRectanglesWhoseQueriesSeeEnough) {
  const Rectangle corner{0, 8, 0, 8, {false, 0, 1, 1, 1}};  // 4.5 keys on average
  const auto inverse = [&](int64_t least) {
    return plan_ragged(std::vector{corner}, false, 9, no_limit, least).inverse.size();
  };
  EXPECT_EQ(inverse(4), 1U);
  EXPECT_EQ(inverse(5), 0U);
  EXPECT_TRUE(plan_ragged(std::vector{corner}, true, 9, no_limit, 4).inverse.empty());
}

TEST(ReversedRows, OfALongIntervalAreSeveralPieces) {
  const ReversedRows reversed =
      reversed_rows(std::vector{Rectangle{10, 600, 5, 600, {false, 0, 1, 1, 1}}});
  EXPECT_EQ(reversed.queries, (Round{{10, 599, 512, -1}, {522, 87, 88, -1}}));
  EXPECT_EQ(exchanged(reversed.queries), (Round{{88, 521, 512, -1}, {0, 609, 88, -1}}));
  EXPECT_EQ(reversed.rectangles, (std::vector<Rectangle>{{0, 600, 0, 600, {true, 0}}}));
}

TEST(RaggedPlan, AStaircaseOfEqualStepsIsALogarithmOfEvenBatches) {
  const std::vector<int64_t> lengths(128, 256);
  const RaggedPlan plan = plan_ragged(staircase(0, 0, lengths), false, 1024, 2 * 32768, no_limit);
  ASSERT_EQ(plan.batches.size(), 8U);
  for (const RaggedBatch& batch : plan.batches) {
    EXPECT_NE(even_batch(batch), std::nullopt);
    EXPECT_LE(batch.k_rows, 32768);
  }
  const FirstWriters keys = first_writers(plan.batches, RaggedRows::k, 32768);
  EXPECT_TRUE(keys.first.front());
  EXPECT_TRUE(keys.rest.empty());
}

TEST(RaggedPlan, StepsBehindKeysThatAllSeeAreAlikeToo) {
  // A chunk of a block-causal sequence, against the keys of an earlier chunk and its own.
  std::vector<Rectangle> steps;
  for (int64_t i = 0; i < 16; ++i) steps.push_back({256 * i, 256, 0, 4096 + 256 * (i + 1), {}});
  const RaggedPlan plan = plan_ragged(steps, false, 1024, no_limit, no_limit);
  ASSERT_EQ(plan.batches.size(), 6U);  // the earlier chunk; steps; 4 levels
  int64_t keys = 0;
  for (const RaggedBatch& batch : plan.batches) {
    EXPECT_NE(even_batch(batch), std::nullopt);
    keys += batch.k_rows;
  }
  EXPECT_EQ(keys, 4096 + 4096 + 4 * 2048);
}

TEST(RaggedPlan, DiagonalsBehindAStaircaseStayApart) {
  // Chunks that see those before them, and themselves causally.
  std::vector<Rectangle> chunks;
  for (int64_t i = 0; i < 8; ++i) {
    if (i > 0) chunks.push_back({16 * i, 16, 0, 16 * i, {}});
    chunks.push_back({16 * i, 16, 16 * i, 16, {true, 0}});
  }
  for (const RaggedBatch& batch : plan_ragged(chunks, false, 1024, no_limit, no_limit).batches)
    EXPECT_EQ(key_rounds(batch).size(), 1U);
}

TEST(RaggedPlan, EntriesOfAStaircaseShareNoRows) {
  EXPECT_TRUE(rc::check("disjoint", [] {
    const auto steps = *rc::gen::inRange<size_t>(0, 40);
    const RaggedPlan plan = plan_ragged(
        staircase(3, 5, *rc::gen::container<std::vector<int64_t>>(steps, rc::gen::inRange(1, 5))),
        false, 1024, no_limit, no_limit);
    if (steps < least_steps) return;
    RC_ASSERT(plan.batches.size() <= 1 + 2 * static_cast<size_t>(std::bit_width(steps)));
    for (const RaggedBatch& batch : plan.batches) {
      RC_ASSERT(query_rounds(batch).size() == 1);
      RC_ASSERT(key_rounds(batch).size() == 1);
    }
  }));
}

TEST(RaggedPlan, EveryQueryOfAnEntrySeesAKey) {
  // A row that sees nothing has no log-sum-exp, which libraries treat as each sees fit.
  EXPECT_TRUE(rc::check("no empty rows", [] {
    const RaggedPlan plan = plan_ragged(arbitrary_rectangles(), false, 100, no_limit, no_limit);
    for (const RaggedBatch& batch : plan.batches)
      for (const RaggedEntry& e : batch.entries) {
        RC_ASSERT(e.q_length > 0);
        RC_ASSERT(e.k_length > 0);
        if (batch.mask == RaggedMask::causal) RC_ASSERT(e.q_length == e.k_length);
        if (batch.mask == RaggedMask::causal_end) RC_ASSERT(e.q_length < e.k_length);
      }
  }));
}

TEST(RaggedPlan, EvenBatchesAreThoseOfEqualLengthsAndDistances) {
  using Entries = std::vector<RaggedEntry>;
  const auto even = [](Entries entries) {
    RaggedBatch batch;
    batch.entries = std::move(entries);
    return even_batch(batch);
  };
  EXPECT_EQ(even({}), std::nullopt);
  EXPECT_EQ(even({{7, 30, 9, 40, 0, 0}}), (EvenBatch{30, 40}));
  const Entries three = {{7, 30, 9, 40, 0, 0}, {40, 30, 59, 40, 30, 40}, {73, 30, 109, 40, 60, 80}};
  EXPECT_EQ(even(three), (EvenBatch{33, 50}));
  for (const auto number : {&RaggedEntry::q_begin, &RaggedEntry::q_length, &RaggedEntry::k_begin,
                            &RaggedEntry::k_length}) {
    Entries other = three;
    ++(other.back().*number);
    EXPECT_EQ(even(other), std::nullopt);
  }
  EXPECT_EQ(even({{0, 30, 0, 40, 0, 0}, {29, 30, 40, 40, 0, 0}}), std::nullopt) << "shared queries";
  EXPECT_EQ(even({{0, 30, 0, 40, 0, 0}, {30, 30, 0, 40, 0, 0}}), std::nullopt) << "shared keys";
  EXPECT_EQ(even({{0, 30, 40, 40, 0, 0}, {30, 30, 0, 40, 0, 0}}), std::nullopt) << "descending";
}

TEST(RaggedPlan, BatchesStayWithinTheirLimits) {
  EXPECT_TRUE(rc::check("limits", [] {
    const auto max_entries = *rc::gen::inRange<int64_t>(1, 5);
    const auto max_rows = *rc::gen::inRange<int64_t>(1, 40);
    const RaggedPlan plan =
        plan_ragged(arbitrary_rectangles(), false, max_entries, max_rows, no_limit);
    for (const RaggedBatch& batch : plan.batches) {
      RC_ASSERT(std::ssize(batch.entries) <= max_entries);
      RC_ASSERT(batch.entries.size() == 1 ||
                std::ssize(batch.entries) * std::max(batch.longest_q, batch.longest_k) <= max_rows);
      int64_t q_row = 0, k_row = 0, longest_q = 0, longest_k = 0, q_begin = 0, q_end = 0;
      for (const RaggedEntry& e : batch.entries) {
        RC_ASSERT(e.q_begin >= q_begin);
        q_begin = e.q_begin;
        q_end = std::max(q_end, e.q_begin + e.q_length);
        RC_ASSERT(e.q_row == q_row);
        RC_ASSERT(e.k_row == k_row);
        q_row += e.q_length;
        k_row += e.k_length;
        longest_q = std::max(longest_q, e.q_length);
        longest_k = std::max(longest_k, e.k_length);
      }
      RC_ASSERT(q_end == batch.q_end);
      RC_ASSERT(q_row == batch.q_rows);
      RC_ASSERT(k_row == batch.k_rows);
      RC_ASSERT(longest_q == batch.longest_q);
      RC_ASSERT(longest_k == batch.longest_k);
    }
  }));
}

TEST(RaggedPlan, EntriesOfABatchAreOfSimilarLength) {
  EXPECT_EQ(length_class(1), 0);
  EXPECT_EQ(length_class(512), 0);
  EXPECT_EQ(length_class(513), 1);
  EXPECT_EQ(length_class(2048), 1);
  EXPECT_EQ(length_class(2049), 2);
  const auto square = [](int64_t begin, int64_t length) {
    return Rectangle{begin, length, begin, length, {true, 0}};
  };
  const RaggedPlan plan = plan_ragged(
      std::vector{square(0, 7), square(10, 4096), square(5000, 300), square(6000, 8000)}, false,
      100, no_limit, no_limit);
  ASSERT_EQ(plan.batches.size(), 2U);
  EXPECT_EQ(plan.batches[0].longest_q, 300);
  EXPECT_EQ(plan.batches[1].entries.size(), 2U);
}

TEST(RaggedPlan, ABatchCanGoBackToRectangles) {
  EXPECT_TRUE(rc::check("back", [] {
    const RaggedPlan plan = plan_ragged(arbitrary_rectangles(), false, 100, no_limit, no_limit);
    for (const RaggedBatch& batch : plan.batches) {
      Pairs pairs;
      for (const RaggedEntry& e : batch.entries) count(pairs, batch, e);
      const std::vector<Rectangle> rectangles = rectangles_of(batch);
      RC_ASSERT(pairs_of(rectangles) == pairs);
      RC_ASSERT(std::is_sorted(
          rectangles.begin(), rectangles.end(),
          [](const Rectangle& a, const Rectangle& b) { return a.q_begin < b.q_begin; }));
    }
  }));
}

Rectangle causal(int64_t q, int64_t k, int64_t offset, int64_t q_stride = 1, int64_t k_stride = 1,
                 int64_t window = 0) {
  return {100, q, 200, k, {true, offset, q_stride, k_stride, window}};
}

RaggedPlan plan_one(const Rectangle& r) {
  return plan_ragged(std::vector{r}, false, 100, no_limit, no_limit);
}

TEST(RaggedPlan, DiagonalsHaveMasksOfTheirOwn) {
  using Batches = std::vector<std::pair<RaggedMask, RaggedEntry>>;
  const auto batches = [](const Rectangle& r) {
    Batches found;
    for (const RaggedBatch& batch : plan_one(r).batches)
      for (const RaggedEntry& entry : batch.entries) found.emplace_back(batch.mask, entry);
    return found;
  };
  EXPECT_EQ(batches(causal(8, 8, 0)), (Batches{{RaggedMask::causal, {100, 8, 200, 8, 0, 0}}}));
  // Queries behind the diagonal see all keys: the example of the header.
  EXPECT_EQ(batches(causal(8, 6, 2)), (Batches{{RaggedMask::causal_end, {100, 4, 200, 6, 0, 0}},
                                               {RaggedMask::full, {104, 4, 200, 6, 0, 0}}}));
  // Queries that see nothing are left out.
  EXPECT_EQ(batches(causal(8, 8, -3)), (Batches{{RaggedMask::causal, {103, 5, 200, 5, 0, 0}}}));
  EXPECT_EQ(batches(causal(8, 8, -8)), Batches{});
  // Rank 1 of 4 against the keys of rank 2: its query i is before key i.
  EXPECT_EQ(batches(causal(8, 8, -1, 4, 4)),
            (Batches{{RaggedMask::causal, {101, 7, 200, 7, 0, 0}}}));
}

/// Those of a rectangle from `first` on.
Rectangle queries_of(Rectangle r, int64_t first) {
  r.q_begin += first;
  r.q_length -= first;
  r.mask.offset += first * r.mask.q_stride;
  return r;
}

TEST(RaggedPlan, WindowsOfOneLengthAreABatch) {
  const RaggedPlan square = plan_one(causal(8, 8, 0, 1, 1, 7));
  ASSERT_EQ(square.batches.size(), 1U);
  EXPECT_EQ(square.batches[0].mask, RaggedMask::causal);
  EXPECT_EQ(square.batches[0].window, 7);
  EXPECT_TRUE(square.others.empty());
  EXPECT_EQ(plan_one(causal(8, 8, 0, 1, 1, 8)).batches[0].window, 0) << "it hides nothing";
  // 9 keys before the first that the first query sees are left out.
  const RaggedPlan late = plan_one(causal(8, 30, 11, 1, 1, 3));
  ASSERT_EQ(late.batches.size(), 1U);
  EXPECT_EQ(late.batches[0].mask, RaggedMask::causal_end);
  EXPECT_EQ(late.batches[0].entries, (std::vector<RaggedEntry>{{100, 8, 209, 10, 0, 0}}));
  // In positions of the document; 2 keys of each rank of 4.
  EXPECT_EQ(plan_one(causal(8, 8, 0, 4, 4, 8)).batches[0].window, 2);
  const RaggedPlan two =
      plan_ragged(std::vector{causal(8, 8, 0, 1, 1, 7), causal(8, 8, 0, 1, 1, 6)}, false, 100,
                  no_limit, no_limit);
  EXPECT_EQ(two.batches.size(), 2U);
  const RaggedPlan one_query = plan_one(causal(1, 8, 5, 1, 1, 3));
  EXPECT_EQ(one_query.batches[0].mask, RaggedMask::full);
  EXPECT_EQ(one_query.batches[0].entries, (std::vector<RaggedEntry>{{100, 1, 203, 3, 0, 0}}));
}

TEST(RaggedPlan, SaysWhyARectangleIsNoEntry) {
  const auto reason = [](const RaggedPlan& plan, NotRagged why) {
    return plan.reasons[static_cast<size_t>(why)];
  };
  // Queries 4 to 7 see all keys but those that are out of their window.
  const RaggedPlan window = plan_one(causal(8, 6, 2, 1, 1, 4));
  EXPECT_EQ(window.others, (std::vector<Rectangle>{queries_of(causal(8, 6, 2, 1, 1, 4), 4)}));
  EXPECT_EQ(reason(window, NotRagged::window), 1);
  Rectangle inverse = causal(8, 8, 0, 1, 1, 7);
  inverse.mask.causal = false;
  EXPECT_EQ(reason(plan_one(inverse), NotRagged::window), 1);
  EXPECT_EQ(reason(plan_one(causal(8, 8, 0, 2, 1)), NotRagged::strides), 1);
  EXPECT_EQ(reason(plan_ragged(std::vector{causal(8, 8, 0)}, true, 100, no_limit, no_limit),
                   NotRagged::fixed_tiles),
            1);
  std::set<std::string> names;
  for (int i = 0; i < not_ragged_reasons; ++i) names.insert(name_of(static_cast<NotRagged>(i)));
  EXPECT_EQ(names.size(), static_cast<size_t>(not_ragged_reasons));
}

void check_rounds(const std::vector<Round>& rounds, const std::vector<RowPiece>& entries) {
  std::map<int64_t, std::vector<int64_t>> order, want;  // of scratch rows, by row of the result
  for (const Round& round : rounds) {
    std::set<int64_t> seen;
    for (const RowPiece& p : round)
      for (int64_t i = 0; i < p.length; ++i) {
        RC_ASSERT(seen.insert(p.row + i).second);
        order[p.row + i].push_back(p.scratch + i);
      }
  }
  for (const RowPiece& p : entries)
    for (int64_t i = 0; i < p.length; ++i) want[p.row + i].push_back(p.scratch + i);
  RC_ASSERT(order == want);
}

TEST(RaggedRounds, TouchARowOnceAndKeepTheOrderOfEntries) {
  EXPECT_TRUE(rc::check("rounds", [] {
    const RaggedPlan plan = plan_ragged(arbitrary_rectangles(), false, 100, no_limit, no_limit);
    for (const RaggedBatch& batch : plan.batches) {
      std::vector<RowPiece> queries, keys;
      for (const RaggedEntry& e : batch.entries) {
        queries.push_back({e.q_begin, e.q_row, e.q_length});
        keys.push_back({e.k_begin, e.k_row, e.k_length});
      }
      check_rounds(query_rounds(batch), queries);
      check_rounds(key_rounds(batch), keys);
    }
  }));
}

/// A batch of entries of these rows [first, second), of queries and of keys alike.
RaggedBatch batch_of(const std::vector<std::pair<int64_t, int64_t>>& runs) {
  RaggedBatch batch;
  for (const auto& [begin, end] : runs)
    batch.entries.push_back({begin, end - begin, begin, end - begin, 0, 0});
  return batch;
}

TEST(RaggedFirstWriters, ABatchIsFirstWhereNothingElseWas) {
  const std::vector<RaggedBatch> batches = {
      batch_of({{2, 4}, {8, 10}}), batch_of({{4, 6}, {9, 11}}),  // row 9 once more
      batch_of({{11, 12}, {6, 7}}), batch_of({{15, 17}, {16, 18}})};
  for (const RaggedRows side : {RaggedRows::q, RaggedRows::k}) {
    const FirstWriters writers = first_writers(batches, side, 20);
    EXPECT_EQ(writers.first, (std::vector<bool>{true, false, true, false}));
    EXPECT_EQ(writers.rest, (Round{{0, 0, 2}, {4, 4, 2}, {7, 7, 1}, {10, 10, 1}, {12, 12, 8}}));
    EXPECT_EQ(writers.touched, (Round{{2, 2, 5}, {8, 8, 4}, {15, 15, 3}}));
    EXPECT_EQ(writers.outside, (Round{{0, 0, 2}, {7, 7, 1}, {12, 12, 3}, {18, 18, 2}}));
  }
  EXPECT_EQ(first_writers({}, RaggedRows::q, 600).rest, (Round{{0, 0, 512}, {512, 512, 88}}));
  EXPECT_TRUE(first_writers({}, RaggedRows::q, 0).rest.empty());
  EXPECT_EQ(first_writers({{batch_of({{3, 600}})}}, RaggedRows::q, 600).touched,
            (Round{{3, 3, 512}, {515, 515, 85}}));
}

TEST(RaggedFirstWriters, DiagonalsOfAShardAreFirstForAllOfIt) {
  // Chunks of 4, an early and a late one of the same document, against their own keys.
  const auto part = [](int64_t q, int64_t k, Mask mask) { return Rectangle{q, 4, k, 4, mask}; };
  const RaggedPlan plan =
      plan_ragged(std::vector{part(0, 0, {true, 0}), part(4, 0, {}), part(4, 4, {true, 0})}, false,
                  9, no_limit, no_limit);
  const FirstWriters writers = first_writers(plan.batches, RaggedRows::q, 8);
  EXPECT_EQ(writers.first, (std::vector<bool>{true, true}));  // the late one is a single entry
  EXPECT_TRUE(writers.rest.empty());
  EXPECT_EQ(overwriting_batches(plan.batches, RaggedRows::k), (std::vector<bool>{true, false}));
}

TEST(RaggedFirstWriters, AreThoseOfTheDefinition) {
  EXPECT_TRUE(rc::check("first writers", [] {
    constexpr int64_t rows = 24;
    std::vector<RaggedBatch> batches(*rc::gen::inRange<size_t>(0, 5));
    std::set<int64_t> touched, written;
    std::vector<bool> first;
    for (RaggedBatch& batch : batches) {
      std::vector<std::pair<int64_t, int64_t>> runs(*rc::gen::inRange<size_t>(1, 4));
      bool alone = true;
      std::set<int64_t> mine;
      for (auto& [begin, end] : runs) {
        begin = *rc::gen::inRange<int64_t>(0, rows);
        end = *rc::gen::inRange<int64_t>(begin + 1, std::min(rows, begin + 6) + 1);
        for (int64_t r = begin; r < end; ++r)
          alone = mine.insert(r).second && !touched.contains(r) && alone;
      }
      batch = batch_of(runs);
      touched.insert(mine.begin(), mine.end());
      if (alone) written.insert(mine.begin(), mine.end());
      first.push_back(alone);
    }
    const FirstWriters writers = first_writers(batches, RaggedRows::q, rows);
    RC_ASSERT(writers.first == first);
    std::set<int64_t> all = touched;
    for (const RowPiece& p : writers.outside)
      for (int64_t r = p.row; r < p.row + p.length; ++r) RC_ASSERT(all.insert(r).second);
    RC_ASSERT(std::ssize(all) == rows);
    for (const RowPiece& p : writers.touched)
      for (int64_t r = p.row; r < p.row + p.length; ++r) RC_ASSERT(touched.erase(r) == 1);
    RC_ASSERT(touched.empty());
    for (const RowPiece& p : writers.rest)
      for (int64_t r = p.row; r < p.row + p.length; ++r) RC_ASSERT(written.insert(r).second);
    RC_ASSERT(std::ssize(written) == rows);
    RC_ASSERT((written.empty() || *written.rbegin() == rows - 1));
  }));
}

TEST(RaggedTables, CountElements) {
  RaggedBatch batch;
  batch.entries = {{10, 3, 20, 5, 0, 0}, {40, 2, 3, 7, 3, 5}};
  using Lengths = std::vector<int32_t>;
  using Offsets = std::vector<int64_t>;
  EXPECT_EQ(ragged_lengths(batch, RaggedRows::q), (Lengths{3, 2}));
  EXPECT_EQ(ragged_lengths(batch, RaggedRows::scratch_k), (Lengths{5, 7}));
  EXPECT_EQ(first_row(batch, RaggedRows::q), 8);  // a multiple of 4
  EXPECT_EQ(ragged_offsets(batch, RaggedRows::q, 100), (Offsets{200, 3200, 3400}));
  EXPECT_EQ(ragged_offsets(batch, RaggedRows::k, 10), (Offsets{200, 30, 250}));
  EXPECT_EQ(ragged_offsets(batch, RaggedRows::scratch_q, 8), (Offsets{0, 24, 40}));
  EXPECT_EQ(ragged_offsets(batch, RaggedRows::scratch_k, 8), (Offsets{0, 40, 96}));
  batch.entries = {{1 << 20, 1, 0, 1, 0, 0}, {0, 1, 0, 1, 1, 1}};  // more than 32 bits
  EXPECT_EQ(ragged_offsets(batch, RaggedRows::q, 1 << 14)[0], int64_t{1} << 34);
}

TEST(RaggedTables, EndWithTheFurthestEntry) {  // which need not be the last
  RaggedBatch batch;
  batch.entries = {{40, 2, 0, 7, 0, 0}, {10, 3, 20, 5, 2, 7}, {0, 4, 3, 9, 5, 12}};
  EXPECT_EQ(ragged_offsets(batch, RaggedRows::q, 100), (std::vector<int64_t>{4000, 1000, 0, 4200}));
  EXPECT_EQ(ragged_offsets(batch, RaggedRows::k, 10), (std::vector<int64_t>{0, 200, 30, 250}));
}

TEST(RaggedLimits, ReachBeyondEveryRow) {  // the example of the header
  RaggedBatch batch;
  const RaggedEntry first = {0, 300, 0, 40, 0, 0};
  batch.longest_q = 300;
  batch.longest_k = 40;
  batch.entries = {first, {50000, 300, 0, 40, 300, 40}};
  EXPECT_EQ(limits_of(batch), (RaggedLimits{32768, 128}));
  batch.entries = {first, {0, 300, 512 - 40, 40, 300, 40}};
  EXPECT_EQ(limits_of(batch), (RaggedLimits{512, 256})) << "512 / 2, and no more";
  batch.entries[1].k_begin += 1;
  EXPECT_EQ(limits_of(batch), (RaggedLimits{512, 512})) << "one key more";
  batch.entries = {first, {65536 - 300, 300, 0, 40, 300, 40}};
  EXPECT_EQ(limits_of(batch), (RaggedLimits{32768, 128})) << "65536 / 2, and no more";
  batch.entries[1].q_begin += 1;
  EXPECT_EQ(limits_of(batch), (RaggedLimits{65536, 128})) << "one query more";
  batch.entries = {{0, 300, 0, 40, 0, 0}, {0, 1, 5, 7, 300, 40}, {0, 1, 9, 1, 301, 47}};
  EXPECT_EQ(limits_of(batch), (RaggedLimits{512, 128})) << "entries at the same rows";
  batch.entries = {{50000, 300, 3, 40, 0, 0}};
  EXPECT_EQ(limits_of(batch), (RaggedLimits{512, 128})) << "rows before it do not count";
  EXPECT_TRUE(rc::check("limits", [] {
    const RaggedPlan plan = plan_ragged(arbitrary_rectangles(), false, 100, no_limit, no_limit);
    for (RaggedBatch b : plan.batches) {
      for (RaggedEntry& e : b.entries) {
        e.q_begin += *rc::gen::inRange<int64_t>(0, 5000);
        e.k_begin += *rc::gen::inRange<int64_t>(0, 5000);
      }
      const RaggedLimits limits = limits_of(b);
      RC_ASSERT(limits.longest_q >= b.longest_q && limits.longest_k >= b.longest_k);
      const int64_t entries = std::ssize(b.entries);
      for (const RaggedEntry& e : b.entries) {
        RC_ASSERT(e.q_begin + e.q_length - first_row(b, RaggedRows::q) <=
                  entries * limits.longest_q);
        RC_ASSERT(e.k_begin + e.k_length - first_row(b, RaggedRows::k) <=
                  entries * limits.longest_k);
      }
    }
  }));
}

TEST(RaggedBatch, IsFilledUpByEntriesOfOneRow) {
  RaggedBatch batch;
  for (int64_t i = 0; i < 9; ++i) batch.entries.push_back({40 + 3 * i, 3, 7, 5, 3 * i, 5 * i});
  batch.q_rows = 27;
  batch.k_rows = 45;
  const RaggedBatch filled = filled_up(batch);
  ASSERT_EQ(filled.entries.size(), 16U);
  EXPECT_EQ(filled.entries[8], batch.entries[8]);
  EXPECT_EQ(filled.entries[9], (RaggedEntry{40, 1, 7, 1, 27, 45}));
  EXPECT_EQ(filled.entries[15], (RaggedEntry{40, 1, 7, 1, 33, 51}));
  EXPECT_EQ(filled.q_rows, 34);
  EXPECT_EQ(filled.k_rows, 52);
  EXPECT_EQ(filled_up(filled).entries, filled.entries);
  batch.entries.resize(7);
  EXPECT_EQ(filled_up(batch).entries, batch.entries);
}

TEST(RaggedTables, SizesAreRoundedToPowersOfTwo) {
  EXPECT_EQ(rounded_up(1, 16), 16);
  EXPECT_EQ(rounded_up(17, 16), 32);
  EXPECT_EQ(rounded_up(8192, 1), 8192);
}

TEST(RaggedPlan, TakesWholeLayoutsWithoutWindow) {
  EXPECT_TRUE(rc::check("layouts", [] {
    const test::LayoutCase c = test::arbitrary_layout();
    const int queries = *rc::gen::inRange(0, c.layout.cp());
    const int keys = *rc::gen::inRange(0, c.layout.cp());
    const std::vector<Rectangle> rectangles =
        intersect(c.layout.shards[queries], c.layout.shards[keys], MaskKind::causal);
    const RaggedPlan plan = plan_ragged(rectangles, false, 1024, no_limit, no_limit);
    RC_ASSERT(pairs_of(plan) == pairs_of(rectangles));
    RC_ASSERT(plan.reasons[static_cast<size_t>(NotRagged::window)] == 0);
    for (const Rectangle& r : plan.others) RC_ASSERT(r.mask.q_stride != r.mask.k_stride);
  }));
}

}  // namespace GYRE_FILE
}  // namespace gyre
