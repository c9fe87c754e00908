// Rectangles against counting: masks, windows, strides, trimming.

#include "attention/rectangle.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <map>
#include <set>

#include "attention/row_set.hpp"
#include "layout_cases.hpp"
#include "mask_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

MaskRule arbitrary_rule() {
  return *rc::gen::element(MaskRule{MaskKind::causal}, MaskRule{MaskKind::full},
                           MaskRule{MaskKind::causal, *rc::gen::inRange<int64_t>(1, 12)});
}

/// Any mask for the documents of arbitrary_shard().
MaskRule arbitrary_mask() {
  return test::arbitrary_mask({44, 30, 44});
}

/// Whether a rectangle's query i sees its key j, by positions.
bool sees(const Mask& mask, int64_t i, int64_t j) {
  const int64_t query = mask.offset + i * mask.q_stride, key = j * mask.k_stride;
  return (!mask.causal || key <= query) && (mask.window == 0 || key > query - mask.window);
}

Rectangle arbitrary_rectangle() {
  const auto stride = [] { return *rc::gen::inRange<int64_t>(1, 5); };
  return {0,
          *rc::gen::inRange<int64_t>(0, 12),
          0,
          *rc::gen::inRange<int64_t>(0, 12),
          {*rc::gen::arbitrary<bool>(), *rc::gen::inRange<int64_t>(-40, 40), stride(), stride(),
           *rc::gen::inRange<int64_t>(0, 9)}};
}

TEST(Rectangle, CountsItsPairs) {
  EXPECT_TRUE(rc::check("pairs", [] {
    const Rectangle r = arbitrary_rectangle();
    int64_t pairs = 0;
    for (int64_t i = 0; i < r.q_length; ++i)
      for (int64_t j = 0; j < r.k_length; ++j) pairs += sees(r.mask, i, j) ? 1 : 0;
    RC_ASSERT(r.pairs() == pairs);
  }));
}

TEST(Rectangle, BeginAndEndKeyBoundWhatAQuerySees) {
  EXPECT_TRUE(rc::check("keys", [] {
    const Rectangle r = arbitrary_rectangle();
    for (int64_t i = 0; i < r.q_length; ++i)
      for (int64_t j = 0; j < r.k_length; ++j)
        RC_ASSERT(sees(r.mask, i, j) == (j >= r.mask.begin_key(i) && j < r.mask.end_key(i)));
  }));
}

TEST(VisiblePairs, AreTheSumOfWhatTokensSee) {
  EXPECT_EQ(visible_pairs(5, MaskKind::full), 25);
  EXPECT_EQ(visible_pairs(5, MaskKind::causal), 15);
  EXPECT_EQ(visible_pairs(5, {MaskKind::causal, 2}), 9);
  EXPECT_EQ(visible_pairs(5, {MaskKind::causal, 5}), 15);
  EXPECT_EQ(visible_pairs(5, {MaskKind::causal, 50}), 15);
  EXPECT_EQ(visible_pairs(0, MaskKind::causal), 0);
}

/// Fragments of up to three documents; their local rows do not overlap.
Shard arbitrary_shard() {
  Shard shard;
  const int fragments = *rc::gen::inRange(0, 5);
  for (int i = 0; i < fragments; ++i) {
    shard.slots += *rc::gen::inRange<int64_t>(0, 3);
    Fragment f;
    f.segment = *rc::gen::inRange<int64_t>(0, 3);
    f.start = DocPosition(*rc::gen::inRange<int64_t>(0, 20));
    f.stride = *rc::gen::inRange<int64_t>(1, 4);
    f.length = *rc::gen::inRange<int64_t>(1, 9);
    f.local_begin = LocalToken(shard.slots);
    shard.slots += f.length;
    shard.fragments.push_back(f);
  }
  return shard;
}

using Rows = std::map<std::pair<int64_t, int64_t>, int>;  // (query, key) -> times

Rows visible(const Shard& queries, const Shard& keys, const MaskRule& rule) {
  Rows rows;
  for (const Fragment& q : queries.fragments)
    for (const Fragment& k : keys.fragments)
      for (int64_t i = 0; i < q.length; ++i)
        for (int64_t j = 0; j < k.length; ++j) {
          const DocPosition query = q.start + i * q.stride, key = k.start + j * k.stride;
          if (q.segment == k.segment && test::shows(rule, q.segment, query.value(), key.value()))
            ++rows[{q.local_begin.value() + i, k.local_begin.value() + j}];
        }
  return rows;
}

/// The pairs of rectangles, which must be sorted and not empty.
Rows pairs_of(const std::vector<Rectangle>& rectangles) {
  Rows rows;
  for (size_t n = 0; n < rectangles.size(); ++n) {
    const Rectangle& r = rectangles[n];
    EXPECT_GT(r.pairs(), 0);
    EXPECT_TRUE(n == 0 || rectangles[n - 1].q_begin <= r.q_begin);
    for (int64_t i = 0; i < r.q_length; ++i)
      for (int64_t j = 0; j < r.k_length; ++j)
        if (sees(r.mask, i, j)) ++rows[{r.q_begin + i, r.k_begin + j}];
  }
  EXPECT_EQ(total_pairs(rectangles), std::ssize(rows));
  return rows;
}

TEST(Intersect, GivesTheVisiblePairsAndNoOthers) {
  EXPECT_TRUE(rc::check("brute force", [] {
    const Shard queries = arbitrary_shard(), keys = arbitrary_shard();
    const MaskRule rule = arbitrary_mask();
    for (const Trim trim : {Trim::both, Trim::nothing})
      RC_ASSERT(pairs_of(intersect(queries, keys, rule, trim)) == visible(queries, keys, rule));
  }));
}

Shard one_fragment(int64_t start, int64_t stride, int64_t length) {
  Shard shard;
  shard.fragments.push_back({0, DocPosition(start), stride, length, LocalToken(0)});
  shard.slots = length;
  return shard;
}

TEST(Intersect, OfAllStridesDistancesAndWindows) {
  for (const int64_t q_stride : {1, 2, 3})
    for (const int64_t k_stride : {1, 2, 3})
      for (int64_t start = 0; start < 20; ++start)
        for (int64_t window = 0; window < 9; ++window)
          for (const Trim trim : {Trim::both, Trim::nothing}) {
            const Shard queries = one_fragment(start, q_stride, 4),
                        keys = one_fragment(8, k_stride, 4);
            const MaskRule rule(MaskKind::causal, window);
            EXPECT_EQ(pairs_of(intersect(queries, keys, rule, trim)), visible(queries, keys, rule))
                << "strides " << q_stride << " " << k_stride << ", start " << start << ", window "
                << window;
          }
}

TEST(Intersect, TrimsToTheRowsThatSeeOrAreSeen) {
  EXPECT_TRUE(rc::check("ends of rectangles of one stride", [] {
    Shard queries = arbitrary_shard(), keys = arbitrary_shard();
    for (Shard* shard : {&queries, &keys})
      for (Fragment& f : shard->fragments) f.stride = 2;
    for (const Rectangle& r : intersect(queries, keys, arbitrary_mask())) {
      const auto query_sees = [&](int64_t i) {
        bool any = false;
        for (int64_t j = 0; j < r.k_length; ++j) any = any || sees(r.mask, i, j);
        return any;
      };
      const auto key_is_seen = [&](int64_t j) {
        bool any = false;
        for (int64_t i = 0; i < r.q_length; ++i) any = any || sees(r.mask, i, j);
        return any;
      };
      RC_ASSERT(query_sees(0));
      RC_ASSERT(query_sees(r.q_length - 1));
      RC_ASSERT(key_is_seen(0));
      RC_ASSERT(key_is_seen(r.k_length - 1));
    }
  }));
}

TEST(Intersect, KeepsCornersWhenItShould) {
  EXPECT_TRUE(rc::check("Trim::nothing", [] {
    const Shard queries = arbitrary_shard(), keys = arbitrary_shard();
    const auto is_fragment = [](const Shard& shard, int64_t begin, int64_t length) {
      return std::any_of(shard.fragments.begin(), shard.fragments.end(), [&](const Fragment& f) {
        return f.local_begin.value() == begin && f.length == length;
      });
    };
    for (const Rectangle& r : intersect(queries, keys, arbitrary_rule(), Trim::nothing)) {
      RC_ASSERT(is_fragment(queries, r.q_begin, r.q_length));
      RC_ASSERT(is_fragment(keys, r.k_begin, r.k_length));
    }
  }));
}

TEST(Intersect, OfTheDiagonalAndBelow) {
  const auto fragment = [](int64_t start, int64_t length) {
    return one_fragment(start, 1, length);
  };
  const MaskRule causal, window(MaskKind::causal, 3);
  using Rectangles = std::vector<Rectangle>;
  EXPECT_EQ(intersect(fragment(4, 4), fragment(4, 4), causal),
            (Rectangles{{0, 4, 0, 4, {true, 0, 1, 1, 0}}}));
  EXPECT_EQ(intersect(fragment(4, 4), fragment(0, 4), causal), (Rectangles{{0, 4, 0, 4, {}}}));
  EXPECT_TRUE(intersect(fragment(0, 4), fragment(4, 4), causal).empty());
  // Queries 4 and 5 see keys 2 and 3, and 3.
  EXPECT_EQ(intersect(fragment(4, 4), fragment(0, 4), window),
            (Rectangles{{0, 2, 2, 2, {true, 2, 1, 1, 3}}}));
  EXPECT_TRUE(intersect(fragment(6, 4), fragment(0, 4), window).empty());
}

TEST(RowSet, IsASetOfRows) {
  EXPECT_TRUE(rc::check([] {
    RowSet rows;
    std::set<int64_t> twin;
    for (int i = 0; i < 20; ++i) {
      const auto begin = *rc::gen::inRange<int64_t>(0, 60);
      const auto end = *rc::gen::inRange<int64_t>(begin, 64);
      int64_t before = 0;
      for (int64_t row = begin; row < end; ++row) before += twin.insert(row).second ? 0 : 1;
      RC_ASSERT(rows.add(begin, end) == before);
    }
    std::set<int64_t> found;
    int64_t last = -1;
    for (const auto& [begin, end] : rows.runs()) {
      RC_ASSERT(begin > last && end > begin);
      for (int64_t row = begin; row < end; ++row) found.insert(row);
      last = end;
    }
    RC_ASSERT(found == twin);
    RC_ASSERT(rows.count() == std::ssize(twin));
  }));
}

TEST(RowSet, OfRectanglesIsThatOfTheirQueriesOrKeys) {
  const std::vector<Rectangle> rectangles = {{2, 3, 0, 4, {}}, {4, 3, 10, 2, {}}};
  EXPECT_EQ(queries_of(rectangles).runs(), (std::vector<RowSet::Run>{{2, 7}}));
  EXPECT_EQ(keys_of(rectangles).runs(), (std::vector<RowSet::Run>{{0, 4}, {10, 12}}));
}

}  // namespace GYRE_FILE
}  // namespace gyre
