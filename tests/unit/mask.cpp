// Masks against their definitions, pair by pair.

#include "attention/mask.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <set>

#include "attention/masks/registry.hpp"
#include "core/token_random.hpp"
#include "errors.hpp"
#include "mask_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::shows;

/// Expects a usage error that says this, among other things.
void expect_usage(const std::string& part, const std::function<void()>& work) {
  const std::string message = test::usage_message(work);
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(Region, CountsWhatItsPictureShows) {
  EXPECT_TRUE(rc::check("brute force", [] {
    const int64_t length = *rc::gen::inRange<int64_t>(1, 30);
    for (const Region& r : test::arbitrary_regions(length)) {
      int64_t pairs = 0;
      for (int64_t q = 0; q < length; ++q) {
        RC_ASSERT(r.pairs(q) == pairs);
        int64_t keys = 0;
        for (int64_t k = 0; k < length; ++k) keys += shows(r, q, k) ? 1 : 0;
        pairs += keys;
        if (q < r.q_begin || q >= r.q_end) continue;
        const Region::Keys seen = r.keys_of(q);
        RC_ASSERT(seen.count() == keys);
        if (keys > 0) RC_ASSERT(shows(r, q, seen.first) && shows(r, q, seen.last));
      }
      RC_ASSERT(r.pairs() == pairs);
    }
  }));
}

TEST(MaskRule, AWindowAtTheEndOfIntegersIsNone) {
  const int64_t lengths[] = {9}, most = std::numeric_limits<int64_t>::max();
  const MaskRule none(MaskKind::causal), huge(MaskKind::causal, most);
  const Region half{2, 9, 1, 7, RegionKind::causal};
  Region cut = half;
  cut.window = most;
  const MaskRule region(MaskTable({{half}}, lengths)), cut_region(MaskTable({{cut}}, lengths));
  for (const auto& [plain, wide] : {std::pair{&none, &huge}, {&region, &cut_region}}) {
    const DocumentMask a(*plain, 0, 9), b(*wide, 0, 9);
    EXPECT_EQ(a.pairs(9), b.pairs(9));
    for (int64_t t = 0; t < 9; ++t) EXPECT_EQ(a.pairs(t), b.pairs(t));
    EXPECT_EQ(a.keys_of_queries(), b.keys_of_queries());
    EXPECT_EQ(a.queries_of_keys(), b.queries_of_keys());
  }
}

TEST(MaskRule, PairsOfAllHeadsAreCountedUpToTheEndOfIntegers) {
  const int64_t giga = int64_t{1} << 30, offsets[] = {0, 1, 1 + giga}, heads = int64_t{1} << 32;
  EXPECT_EQ(pairs_of_heads(std::span(offsets).first(2), MaskRule(), heads), heads);
  const int64_t causal = 1 + giga / 2 * (giga + 1);
  EXPECT_EQ(pairs_of_heads(offsets, MaskRule(), 15), 15 * causal);
  EXPECT_EQ(pairs_of_heads(offsets, {MaskKind::causal, 1}, heads), heads * (giga + 1));
  expect_usage(
      "1073741825 tokens under 32 heads have 1.84e+19 visible pairs of a query and a key; "
      "at most 2^63 - 1 can be counted: 15 heads work",
      [&] { pairs_of_heads(offsets, MaskRule(), 32); });
  const std::vector<int64_t> many(16, 4 * giga * (giga / 4));
  expect_usage("at most 2^63 - 1 can be counted: take shorter documents",
               [&] { pairs_of_heads(many, 8 * giga, 1); });
}

TEST(OfLastQueries, ShowsThemWhatTheMaskShows) {
  EXPECT_TRUE(rc::check("pair by pair", [] {
    const std::vector<int64_t> lengths = {*rc::gen::inRange<int64_t>(0, 20),
                                          *rc::gen::inRange<int64_t>(1, 20)};
    const MaskRule mask = test::arbitrary_mask(lengths);
    std::vector<int64_t> offsets{0}, query_offsets{0};
    for (const int64_t length : lengths) {
      offsets.push_back(offsets.back() + length);
      query_offsets.push_back(query_offsets.back() + *rc::gen::inRange<int64_t>(0, length + 1));
    }
    const MaskRule last = of_last_queries(mask, offsets, query_offsets);
    for (int64_t d = 0; d < 2; ++d) {
      const int64_t first = lengths[d] - (query_offsets[d + 1] - query_offsets[d]);
      const DocumentMask all(mask, d, lengths[d]), some(last, d, lengths[d]);
      for (int64_t q = 0; q < lengths[d]; ++q)
        for (int64_t k = 0; k < lengths[d]; ++k)
          RC_ASSERT(some.sees(q, k) == (q >= first && all.sees(q, k)));
    }
  }));
}

TEST(DocumentMask, CountsKeysAndQueriesOfEachToken) {
  EXPECT_TRUE(rc::check("brute force", [] {
    const auto length = *rc::gen::inRange<int64_t>(1, 25);
    const MaskRule mask = test::arbitrary_mask({3, length});
    const DocumentMask document(mask, 1, length);
    int64_t pairs = 0, max_keys = 0, max_queries = 0;
    for (int64_t t = 0; t < length; ++t) {
      RC_ASSERT(document.pairs(t) == pairs);
      int64_t keys = 0, queries = 0;
      for (int64_t other = 0; other < length; ++other) {
        RC_ASSERT(document.sees(t, other) == shows(mask, 1, t, other));
        keys += shows(mask, 1, t, other) ? 1 : 0;
        queries += shows(mask, 1, other, t) ? 1 : 0;
      }
      RC_ASSERT(document.keys_of(t) == keys);
      RC_ASSERT(document.keys_of_queries()[t] == keys);
      RC_ASSERT(document.queries_of_keys()[t] == queries);
      pairs += keys;
      max_keys = std::max(max_keys, keys);
      max_queries = std::max(max_queries, queries);
    }
    RC_ASSERT(document.max_keys() == max_keys);
    RC_ASSERT(document.max_queries() == max_queries);
    RC_ASSERT(visible_pairs(length, mask, 1) == pairs);
  }));
}

TEST(NamedMasks, ShowWhatTheirNamesSay) {
  using Definition = std::function<bool(int64_t, int64_t)>;
  const std::vector<std::pair<std::string, Definition>> masks = {
      {"causal", [](int64_t q, int64_t k) { return k <= q; }},
      {"full", [](int64_t, int64_t) { return true; }},
      {"causal,window=4", [](int64_t q, int64_t k) { return k <= q && q - k < 4; }},
      {"causal,window=4,keep=3",
       [](int64_t q, int64_t k) { return k <= q && (q - k < 4 || k < 3); }},
      {"prefix-lm,prefix=5", [](int64_t q, int64_t k) { return k <= q || k < 5; }},
      {"block-causal,block=4", [](int64_t q, int64_t k) { return k / 4 <= q / 4; }},
      {"chunked,chunk=4", [](int64_t q, int64_t k) { return k <= q && k / 4 == q / 4; }},
      {"shared-prefix,prompt=5,answer=3",
       [](int64_t q, int64_t k) { return k <= q && (k < 5 || (k - 5) / 3 == (q - 5) / 3); }},
      {"sliding-window,window=3", [](int64_t q, int64_t k) { return std::abs(q - k) <= 3; }},
      {"sliding-window,window=2,global=4",
       [](int64_t q, int64_t k) { return std::abs(q - k) <= 2 || q < 4 || k < 4; }}};
  std::set<std::string> names{"top-k"};  // below
  const std::vector<int64_t> lengths = {0, 1, 2, 4, 5, 6, 17};
  for (const auto& [text, definition] : masks) {
    const MaskChoice choice = parse_mask(text);
    names.insert(choice.mask->name);
    const MaskRule mask = choice.of(lengths);
    for (size_t d = 0; d < lengths.size(); ++d)
      for (int64_t q = 0; q < lengths[d]; ++q)
        for (int64_t k = 0; k < lengths[d]; ++k)
          EXPECT_EQ(shows(mask, static_cast<int64_t>(d), q, k), definition(q, k))
              << text << ", length " << lengths[d] << ", query " << q << ", key " << k;
  }
  for (const NamedMask& mask : named_masks()) EXPECT_EQ(names.contains(mask.name), !mask.joins);
}

TEST(NamedMasks, TopKShowsTheBestKeysAndOfEqualOnesTheFirst) {
  const std::vector<int64_t> lengths = {40, 0, 1, 7, 90};
  int64_t ties = 0;  // queries whose last selected key has an equal one that is not selected
  for (const uint64_t keys : {1, 7, 200}) {
    const MaskRule mask = parse_mask(fmt::format("top-k,keys={},seed=5", keys)).of(lengths);
    for (size_t d = 0; d < lengths.size(); ++d)
      for (int64_t q = 0; q < lengths[d]; ++q) {
        std::vector<std::pair<int64_t, int64_t>> best;  // less the score, and the position
        const uint64_t row = splitmix64_mix(splitmix64_mix(splitmix64_mix(5) + d) + q);
        for (int64_t k = 0; k <= q; ++k)
          best.emplace_back(-static_cast<int64_t>(splitmix64_mix(row + k) >> 58), k);
        std::sort(best.begin(), best.end());
        if (best.size() > keys) ties += best[keys - 1].first == best[keys].first ? 1 : 0;
        best.resize(std::min<size_t>(best.size(), keys));
        std::set<int64_t> selected;
        for (const auto& [score, k] : best) selected.insert(k);
        for (int64_t k = 0; k < lengths[d]; ++k)
          EXPECT_EQ(shows(mask, static_cast<int64_t>(d), q, k), selected.contains(k))
              << keys << " keys, document " << d << ", query " << q << ", key " << k;
      }
  }
  EXPECT_GT(ties, 50);
  // As many pairs as with a window of so many keys, for every query.
  const MaskRule top = parse_mask("top-k,keys=7").of(lengths), window(MaskKind::causal, 7);
  EXPECT_EQ(DocumentMask(top, 4, 90).keys_of_queries(),
            DocumentMask(window, 4, 90).keys_of_queries());
  expect_usage("selects 31458304 keys; at most 16777216",
               [] { parse_mask("top-k,keys=2K").of(std::vector<int64_t>{1 << 14}); });
  expect_usage("draws 2147516416 scores; at most 1073741824",
               [] { parse_mask("top-k,keys=4").of(std::vector<int64_t>{1 << 16}); });
}

TEST(NamedMasks, JoinDocuments) {
  using Definition = std::function<bool(size_t, size_t)>;  // whether part q sees part k before it
  const std::vector<int64_t> lengths = {0, 5, 1, 0, 6, 3, 0};
  const std::vector<std::pair<std::string, Definition>> masks = {
      {"share-question", [](size_t, size_t k) { return k == 1; }},
      {"causal-blockwise", [](size_t q, size_t) { return q == 5; }}};
  std::vector<size_t> part_of;
  for (size_t i = 0; i < lengths.size(); ++i) part_of.insert(part_of.end(), lengths[i], i);
  std::set<std::string> names;
  for (const auto& [text, sees] : masks) {
    const MaskChoice choice = parse_mask(text);
    names.insert(choice.mask->name);
    EXPECT_EQ(choice.documents_of(lengths), std::vector<int64_t>{15});
    const MaskRule mask = choice.of(lengths);
    for (int64_t q = 0; q < 15; ++q)
      for (int64_t k = 0; k < 15; ++k) {
        const size_t of_q = part_of[q], of_k = part_of[k];
        EXPECT_EQ(shows(mask, 0, q, k), k <= q && (of_q == of_k || sees(of_q, of_k)))
            << text << ", query " << q << ", key " << k;
      }
    EXPECT_EQ(choice.of(std::vector<int64_t>{0}).table->regions(), 0);
  }
  for (const NamedMask& mask : named_masks()) EXPECT_EQ(names.contains(mask.name), mask.joins);
}

TEST(NamedMasks, RefuseWhatTheyCannotBe) {
  EXPECT_EQ(parse_mask("chunked,chunk=4K").values, std::vector<int64_t>{4096});
  expect_usage("nearest: prefix-lm", [] { parse_mask("prefixlm,prefix=3"); });
  expect_usage("needs chunk; wanted: chunked,chunk=N", [] { parse_mask("chunked"); });
  expect_usage("chunk=0; at least 1", [] { parse_mask("chunked,chunk=0"); });
  expect_usage("chunk=1.5 is not a whole number", [] { parse_mask("chunked,chunk=1.5"); });
  expect_usage("'block=4' is none of chunked,chunk=N", [] { parse_mask("chunked,block=4"); });
  expect_usage("--mask causal,keep=4: without a window all tokens are kept",
               [] { parse_mask("causal,keep=4").of(std::vector<int64_t>{9}); });
  expect_usage("'window=4' is none of full", [] { parse_mask("full,window=4"); });
}

TEST(SortedRegions, OfQueriesHaveAllThatHaveThem) {
  EXPECT_TRUE(rc::check("brute force", [] {
    const int64_t length = *rc::gen::inRange<int64_t>(1, 30);
    const MaskRule mask = test::arbitrary_table({length});
    const SortedRegions regions = mask.table->of(0);
    const int64_t begin = *rc::gen::inRange<int64_t>(0, length);
    const int64_t end = *rc::gen::inRange<int64_t>(begin, length + 1);
    const auto some = regions.of_queries(begin, end);
    for (const Region& r : regions.all)
      if (r.q_begin < end && r.q_end > begin)
        RC_ASSERT(std::find(some.begin(), some.end(), r) != some.end());
  }));
  // Regions of one query: no others.
  const MaskRule top = parse_mask("top-k,keys=5").of(std::vector<int64_t>{50});
  const SortedRegions regions = top.table->of(0);
  const auto some = regions.of_queries(20, 30);
  EXPECT_EQ(std::ssize(some), std::ranges::count_if(regions.all, [](const Region& r) {
              return r.q_begin >= 20 && r.q_begin < 30;
            }));
  EXPECT_EQ(some.front().q_begin, 20);
  EXPECT_EQ(some.back().q_begin, 29);
}

TEST(MaskTable, RefusesWhatIsNoMask) {
  const auto refused = [](const std::vector<Region>& regions, const std::string& what) {
    expect_usage(what, [&] { MaskTable({{}, regions}, std::vector<int64_t>{4, 10}); });
  };
  const Region good{0, 10, 0, 10, RegionKind::causal};
  refused({good, {0, 11, 0, 4}},
          "region 1 of document 1, queries [0, 11), keys [0, 4), full, is "
          "not inside of its 10 tokens");
  refused({{3, 3, 0, 4}}, "no queries or no keys");
  refused({{0, 4, 0, 4, RegionKind::causal, -1}}, "the window must be 0");
  refused({{0, 4, 0, 4, RegionKind::inverse, 2}}, "a window needs a causal diagonal");
  refused({good, {5, 6, 0, 5}}, "regions 0 and 1 of document 1 share a pair");
  refused({good, {3, 4, 3, 4}}, "share a pair");
  // A region after others of the same first query that lie further right.
  refused({{2, 6, 0, 2}, {3, 4, 2, 4}, {3, 4, 5, 6}, {4, 5, 7, 9}, {5, 6, 1, 3}},
          "regions 0 and 4 of document 1 share a pair");
  // Both sides of a diagonal share no pair.
  EXPECT_EQ(
      MaskTable({{good, {0, 9, 1, 10, RegionKind::inverse}}}, std::vector<int64_t>{10}).regions(),
      2);
  expect_usage("a mask of 1 documents for 2", [] { MaskTable({{}}, std::vector<int64_t>{4, 10}); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
