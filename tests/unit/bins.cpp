// Bin packers, their measures, and the dealing of bins to ranks.

#include "packing/bins.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>

#include "core/index.hpp"
#include "errors.hpp"
#include "packing/lengths.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_usage;
using Lengths = std::vector<int64_t>;
using Bins = std::vector<Bin>;

BinOptions with_capacity(int64_t capacity) {
  BinOptions options;
  options.capacity = capacity;
  return options;
}

BinOptions with_counts(int64_t capacity, int64_t min, int64_t multiple) {
  BinOptions options = with_capacity(capacity);
  options.min_bin_count = min;
  options.bin_count_multiple = multiple;
  return options;
}

int64_t load_of(const Bin& bin, const Lengths& lengths) {
  int64_t load = 0;
  for (int64_t item : bin) load += lengths[item];
  return load;
}

const Lengths eight = {4, 1, 3, 2, 1, 3, 4, 5};

TEST(NextFit, ClosesABinAtTheFirstMisfit) {
  EXPECT_EQ(next_fit(eight, with_capacity(5)), (Bins{{0, 1}, {2, 3}, {4, 5}, {6}, {7}}));
  EXPECT_EQ(next_fit(eight, with_capacity(8)), (Bins{{0, 1, 2}, {3, 4, 5}, {6}, {7}}));
}

TEST(NextFit, CapsTheItemsOfABin) {
  BinOptions options = with_capacity(100);
  options.max_items = 3;
  EXPECT_EQ(next_fit(eight, options), (Bins{{0, 1, 2}, {3, 4, 5}, {6, 7}}));
  options.max_items = 1;
  EXPECT_EQ(next_fit(Lengths{0, 0}, options), (Bins{{0}, {1}}));
}

TEST(FirstFitDecreasing, TakesTheLongestAndOfEqualsTheHigherIndex) {
  EXPECT_EQ(first_fit_decreasing(eight, with_capacity(5)),
            (Bins{{7}, {6, 4}, {0, 1}, {5, 3}, {2}}));
  EXPECT_EQ(first_fit_decreasing(eight, with_capacity(8)), (Bins{{7, 5}, {6, 0}, {2, 3, 4, 1}}));
}

TEST(ModifiedFirstFitDecreasing, SmallExamples) {
  EXPECT_EQ(modified_first_fit_decreasing(eight, with_capacity(5)),
            (Bins{{7}, {0}, {6}, {2, 3}, {5, 1, 4}}));
  EXPECT_EQ(modified_first_fit_decreasing(eight, with_capacity(8)),
            (Bins{{7, 2}, {5, 3, 1, 4}, {0, 6}}));
}

TEST(ModifiedFirstFitDecreasing, CanSaveABinOrLoseOne) {
  const Lengths saves = {20, 13, 12, 10, 7, 5, 5, 4, 4}, loses = {16, 15, 11, 6, 5, 4};
  EXPECT_EQ(first_fit_decreasing(saves, with_capacity(20)),
            (Bins{{0}, {1, 4}, {2, 6}, {3, 5, 8}, {7}}));
  EXPECT_EQ(modified_first_fit_decreasing(saves, with_capacity(20)),
            (Bins{{0}, {1, 4}, {2, 7, 8}, {3, 5, 6}}));
  EXPECT_EQ(first_fit_decreasing(loses, with_capacity(20)), (Bins{{0, 5}, {1, 4}, {2, 3}}));
  EXPECT_EQ(modified_first_fit_decreasing(loses, with_capacity(20)),
            (Bins{{0}, {1}, {2, 5, 4}, {3}}));
}

TEST(ModifiedFirstFitDecreasing, OfEqualSmallItemsTheSecondOfAPairHasTheHighestIndex) {
  // 4 is the smallest of the small ones, and the largest that fit beside it are all alike.
  EXPECT_EQ(modified_first_fit_decreasing(Lengths{11, 4, 5, 5, 5}, with_capacity(20)),
            (Bins{{0, 1, 4}, {2, 3}}));
}

TEST(ModifiedFirstFitDecreasing, ClassesEndExactlyAtHalfThirdAndSixth) {
  const auto pack = [](int64_t second) {
    return modified_first_fit_decreasing(Lengths{31, second, 11, 12}, with_capacity(60));
  };
  EXPECT_EQ(pack(30), (Bins{{0, 2, 3}, {1}}));  // medium, and too long for the bin of 31
  EXPECT_EQ(pack(21), (Bins{{0, 1}, {3, 2}}));  // medium: before the small ones
  EXPECT_EQ(pack(20), (Bins{{0, 2, 3}, {1}}));  // small, but not one of the two smallest
  EXPECT_EQ(pack(11), (Bins{{0, 1, 3}, {2}}));  // small, and the first of two
  EXPECT_EQ(pack(10), (Bins{{0, 2, 3}, {1}}));  // tiny: after the small ones
}

TEST(ModifiedFirstFitDecreasing, MakesNoEmptyBinWhenNothingIsLeftOver) {
  EXPECT_EQ(modified_first_fit_decreasing(Lengths{9, 8}, with_capacity(10)), (Bins{{0}, {1}}));
}

TEST(Packers, EmptyItemsNeedNoRoom) {
  const Lengths lengths = {0, 5, 0};
  EXPECT_EQ(next_fit(lengths, with_capacity(10)), (Bins{{0, 1, 2}}));
  EXPECT_EQ(first_fit_decreasing(lengths, with_capacity(10)), (Bins{{1, 2, 0}}));
  EXPECT_EQ(balanced_bins(lengths, with_capacity(10)).size(), 1U);
  EXPECT_EQ(modified_first_fit_decreasing(lengths, with_capacity(10)), (Bins{{1, 0, 2}}));
  EXPECT_EQ(modified_first_fit_decreasing(Lengths{0, 0}, with_capacity(1)), (Bins{{0, 1}}));
}

TEST(FirstFitShuffle, PinnedOrders) {
  BinOptions options = with_capacity(8);
  options.seed = 7;
  EXPECT_EQ(first_fit_shuffle(eight, options), (Bins{{2, 3, 5}, {6, 1, 4}, {0}, {7}}));
  options.seed = 8;
  EXPECT_EQ(first_fit_shuffle(eight, options), (Bins{{3, 5, 4, 1}, {6, 0}, {2, 7}}));
}

TEST(FirstFitShuffle, EveryOrderIsAsLikely) {
  // With one item a bin, the bins are the order.
  BinOptions options = with_capacity(1);
  std::map<Bins, int> times;
  for (options.seed = 0; options.seed < 6000; ++options.seed)
    ++times[first_fit_shuffle(Lengths{1, 1, 1}, options)];
  EXPECT_EQ(times.size(), 6U);
  for (const auto& [order, count] : times) EXPECT_NEAR(count, 1000, 150);  // 5 standard deviations
}

TEST(BinCount, NewBinsTakeTheLastItemOfTheFullestBin) {
  Lengths tens(9);
  std::iota(tens.begin(), tens.end(), 1);
  for (int64_t& length : tens) length *= 10;
  const Bins eight_bins = {{8, 0}, {7}, {6}, {5}, {4}, {3}, {2}, {1}};
  EXPECT_EQ(first_fit_decreasing(tens, with_counts(100, 6, 4)), eight_bins);
  EXPECT_EQ(modified_first_fit_decreasing(tens, with_counts(100, 6, 4)), eight_bins);

  const Lengths fives(5, 5);
  EXPECT_EQ(next_fit(fives, with_counts(10, 4, 1)), (Bins{{0, 1}, {2}, {4}, {3}}));
  EXPECT_EQ(first_fit_decreasing(fives, with_counts(10, 4, 1)), (Bins{{4, 3}, {2}, {0}, {1}}));
  EXPECT_EQ(modified_first_fit_decreasing(fives, with_counts(10, 4, 1)),
            (Bins{{4}, {0, 1}, {2}, {3}}));
}

TEST(BinCount, NeedsAnItemForEachBin) {
  expect_usage(
      "5 items cannot fill 8 bins, one each at least (min_bin_count 6, bin_count_multiple 4); they "
      "need 3",
      [] { next_fit(Lengths(5, 5), with_counts(10, 6, 4)); });
  expect_usage(
      "0 items cannot fill 1 bins, one each at least (min_bin_count 1, bin_count_multiple 1); they "
      "need 0",
      [] { next_fit({}, with_counts(10, 1, 1)); });
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  expect_usage(
      "1 items cannot fill 18446744073709551612 bins, one each at least (min_bin_count "
      "9223372036854775807, bin_count_multiple 9223372036854775806); they need 1",
      [] { next_fit(Lengths{1}, with_counts(10, most, most - 1)); });
}

TEST(Packers, TheLongestOversizeItemIsNamed) {
  for (const BinPacker& packer : bin_packers())
    expect_usage(
        "length 30 of item 2 exceeds the bin capacity 10 (the longest of 2 that do not fit)", [&] {
          packer.pack(Lengths{3, 12, 30, 4}, with_capacity(10));
        });
}

TEST(Packers, OversizeItemsGetABinOfTheirOwnWhereAllowed) {
  BinOptions options = with_capacity(10);
  options.oversize = Oversize::own_bin;
  const Lengths lengths = {3, 25, 7};
  EXPECT_EQ(next_fit(lengths, options), (Bins{{0}, {1}, {2}}));
  EXPECT_EQ(first_fit_decreasing(lengths, options), (Bins{{1}, {2, 0}}));
  EXPECT_EQ(modified_first_fit_decreasing(lengths, options), (Bins{{1}, {2, 0}}));
  EXPECT_EQ(balanced_bins(lengths, options), (Bins{{1}, {2, 0}}));
}

TEST(Packers, InvalidArgumentsAreNamed) {
  for (const BinPacker& packer : bin_packers()) {
    const auto refuses = [&](const Lengths& lengths, const BinOptions& options, const char* text) {
      expect_usage(text, [&] { packer.pack(lengths, options); });
    };
    refuses({1}, with_capacity(0), "bin capacity must be at least 1, not 0");
    refuses({1}, with_counts(5, -1, 1), "min_bin_count must be at least 0, not -1");
    refuses({1}, with_counts(5, 0, 0), "bin_count_multiple must be at least 1, not 0");
    refuses({3, -2}, with_capacity(5), "length -2 of item 1 is negative");
    BinOptions options = with_capacity(5);
    options.max_items = -1;
    refuses({1}, options, "max_items must be at least 0 (0: any number), not -1");
    options.max_items = 2;
    if (packer.name == "balanced")
      refuses({1}, options, "max_items is an option of next-fit: balanced takes only 0, not 2");
  }
}

TEST(Packers, ThoseThatCountPairsRefuseLengthsBeyondInt32) {
  for (const char* name : {"balanced", "hybrid"}) {
    const auto pack = find_bin_packer(name).pack;
    BinOptions options = with_capacity(int64_t{1} << 31);
    expect_usage((std::string(name) + ": bin capacity 2147483648 exceeds 2147483647").c_str(),
                 [&] { pack(Lengths{1}, options); });
    options = with_capacity(10);
    options.oversize = Oversize::own_bin;
    expect_usage((std::string(name) + ": length 2147483648 of item 1 exceeds 2147483647").c_str(),
                 [&] {
                   pack(Lengths{1, int64_t{1} << 31}, options);
                 });
  }
}

TEST(HybridBins, AStepTakesWhatItsSlowestGroupAndRankTake) {
  const Lengths lengths = {8, 4, 4, 8, 4};
  const Bins bins = {{0, 1, 2}, {3, 4}};
  BinOptions options = with_capacity(16);
  options.time = {1, 0};
  EXPECT_EQ(step_seconds(bins, lengths, options), 56 + 46);  // one rank: all pairs
  options.dp = 2;
  EXPECT_EQ(step_seconds(bins, lengths, options), 56);
  options.cp = 2;
  EXPECT_EQ(step_seconds(bins, lengths, options), 28);  // each rank: 18 of the first, 10 of another
  options.dp = 1;
  EXPECT_EQ(step_seconds(bins, lengths, options), 28 + 23);
  // Keys are received for long: the first document of 8 stays on one rank, the others on another.
  options.time = {1, 100};
  EXPECT_EQ(step_seconds(std::span(bins).first(1), lengths, options), 36);
  EXPECT_EQ(step_seconds({}, lengths, options), 0);
  // Of three ranks two share 12 tokens: 39 pairs each, and 6 keys for the first. A third rank would
  // make it 8 keys, one alone 78 pairs.
  const Lengths one = {12};
  options = with_capacity(16);
  options.cp = 3;
  options.time = {1, 10};
  EXPECT_EQ(step_seconds(Bins{{0}}, one, options), 60);
  // Bins of 3, 1, 3 and 1 pairs are dealt by their times, not in turn.
  const Lengths pairs = {2, 1, 2, 1};
  options = with_capacity(16);
  options.dp = 2;
  options.time = {1, 0};
  EXPECT_EQ(step_seconds(Bins{{0}, {1}, {2}, {3}}, pairs, options), 4);
}

TEST(HybridBins, TakesTheBinsOfTheShortestStep) {
  std::set<std::string> winners;
  for (const double seconds_per_kv_token : {0.0, 2000.0})
    for (const int dp : {1, 4})
      for (const char* spec : {"dist=long-tailed,count=600,max=64K,seed=1",
                               "dist=uniform,count=100,min=1,max=64K,seed=2"}) {
        const Lengths lengths = draw_lengths(parse_length_spec(spec));
        BinOptions options = options_for_ranks(with_capacity(65536), dp);
        options.cp = 16;
        options.time = {1, seconds_per_kv_token};
        const Bins chosen = hybrid_bins(lengths, options);
        const double seconds = step_seconds(chosen, lengths, options);
        std::string taken;
        for (const BinPacker& packer : bin_packers()) {
          if (packer.by_step) continue;
          const Bins bins = packer.pack(lengths, options);
          if (bins == chosen) taken = packer.name;
          EXPECT_LE(seconds, (1 + 2e-9) * step_seconds(bins, lengths, options)) << packer.name;
        }
        EXPECT_NE(taken, "");
        winners.insert(taken);
      }
  EXPECT_GT(winners.size(), 1U) << *winners.begin();
  // One rank takes as long for any bins: the fewest.
  const Lengths eights(100, 8);
  EXPECT_EQ(hybrid_bins(eights, with_capacity(30)).size(), 34U);
  const Lengths mixed = {5, 6, 5, 6, 5, 5};
  ASSERT_EQ(next_fit(mixed, with_capacity(10)).size(), 5U);
  EXPECT_EQ(hybrid_bins(mixed, with_capacity(10)).size(), 4U);
  EXPECT_EQ(hybrid_bins(mixed, with_counts(10, 5, 3)).size(), 6U);
  EXPECT_EQ(hybrid_bins({}, with_capacity(10)), Bins());
  EXPECT_EQ(hybrid_bins(Lengths{0, 0, 0}, with_capacity(10)).size(), 1U);
}

TEST(Registry, NamesAreMatchedInFullWithoutCase) {
  EXPECT_EQ(find_bin_packer("Modified_First_Fit_DECREASING").name, "modified-first-fit-decreasing");
  EXPECT_EQ(find_bin_packer("next-fit").pack(eight, with_capacity(5)),
            next_fit(eight, with_capacity(5)));
  for (const BinPacker& packer : bin_packers()) EXPECT_EQ(&find_bin_packer(packer.name), &packer);
  for (const char* name : {"mffd", "", "next-fi", "next-fit "})
    expect_usage(("there is no bin packer '" + std::string(name) +
                  "'; there are next-fit, first-fit-decreasing, first-fit-shuffle, "
                  "modified-first-fit-decreasing, balanced, hybrid")
                     .c_str(),
                 [&] { find_bin_packer(name); });
}

/// Lengths from 0, a capacity for them, counts that can be had.
struct Problem {
  Lengths lengths;
  BinOptions options;
};

Problem draw_problem(bool oversize) {
  Problem problem;
  problem.options.capacity = *rc::gen::inRange<int64_t>(1, 80);
  problem.options.oversize = oversize ? Oversize::own_bin : Oversize::reject;
  problem.options.seed = *rc::gen::arbitrary<uint64_t>();
  const int64_t longest = oversize ? 100 : problem.options.capacity;
  problem.lengths = *rc::gen::container<Lengths>(rc::gen::inRange<int64_t>(0, longest + 1));
  const auto items = std::ssize(problem.lengths);
  problem.options.bin_count_multiple = *rc::gen::inRange<int64_t>(1, 4);
  problem.options.min_bin_count = *rc::gen::inRange<int64_t>(0, items + 1);
  return problem;
}

/// Without wishes for the number of bins.
BinOptions without_counts(BinOptions options) {
  options.min_bin_count = 0;
  options.bin_count_multiple = 1;
  return options;
}

/// The number of bins that the options ask for, where packing alone needs `least`.
int64_t bins_asked_for(const BinOptions& options, size_t least) {
  return round_up(std::max(static_cast<int64_t>(least), options.min_bin_count),
                  options.bin_count_multiple);
}

TEST(Packers, EveryItemOnceInAsManyBinsAsAskedForNoneEmpty) {
  for (const BinPacker& packer : bin_packers()) {
    if (packer.by_step) continue;  // its bins are another packer's, with or without counts
    EXPECT_TRUE(rc::check(packer.name, [&packer] {
      const Problem problem = draw_problem(*rc::gen::arbitrary<bool>());
      const auto& [lengths, options] = problem;
      const int64_t count =
          bins_asked_for(options, packer.pack(lengths, without_counts(options)).size());
      if (count > std::ssize(lengths)) {
        RC_ASSERT_THROWS_AS(packer.pack(lengths, options), Error);
        return;
      }
      const Bins bins = packer.pack(lengths, options);
      RC_ASSERT(std::ssize(bins) == count);
      std::vector<int> seen(lengths.size(), 0);
      for (const Bin& bin : bins) {
        RC_ASSERT(!bin.empty());
        int64_t filled = 0;
        for (int64_t item : bin) {
          ++seen[item];
          filled += lengths[item] > 0 ? 1 : 0;
        }
        RC_ASSERT(load_of(bin, lengths) <= options.capacity || filled == 1);
      }
      RC_ASSERT(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
      RC_ASSERT(packer.pack(lengths, options) == bins);
    }));
  }
}

using Pack = Bins (*)(std::span<const int64_t>, const BinOptions&);

void expect_same(const char* what, Pack fast, Pack reference) {
  EXPECT_TRUE(rc::check(what, [=] {
    Problem problem = draw_problem(*rc::gen::arbitrary<bool>());
    const BinOptions natural = without_counts(problem.options);
    if (bins_asked_for(problem.options, reference(problem.lengths, natural).size()) >
        std::ssize(problem.lengths))
      problem.options = natural;
    RC_ASSERT(fast(problem.lengths, problem.options) ==
              reference(problem.lengths, problem.options));
  }));
}

TEST(Packers, FastOnesEqualTheirReferences) {
  expect_same("first-fit-decreasing", first_fit_decreasing, first_fit_decreasing_reference);
  expect_same("first-fit-shuffle", first_fit_shuffle, first_fit_shuffle_reference);
  expect_same("modified-first-fit-decreasing", modified_first_fit_decreasing,
              modified_first_fit_decreasing_reference);
}

TEST(Packers, FastOnesEqualTheirReferencesOnManyDocuments) {
  const BinOptions options = with_capacity(65536);
  for (const char* text : {"dist=long-tailed,count=6000,max=64K", "dist=uniform,count=6000,max=40K",
                           "dist=uniform,count=6000,min=8K,max=24K"}) {
    const Lengths lengths = draw_lengths(parse_length_spec(text));
    EXPECT_EQ(first_fit_decreasing(lengths, options),
              first_fit_decreasing_reference(lengths, options));
    EXPECT_EQ(first_fit_shuffle(lengths, options), first_fit_shuffle_reference(lengths, options));
    EXPECT_EQ(modified_first_fit_decreasing(lengths, options),
              modified_first_fit_decreasing_reference(lengths, options));
  }
}

/// The rule of adjust_bin_count, one new bin at a time by a scan.
Bins adjust_bin_count_reference(Bins bins, size_t target) {
  std::vector<size_t> sizes;
  for (const Bin& bin : bins) sizes.push_back(bin.size());
  while (bins.size() < target) {
    size_t source = sizes.size();
    for (size_t b = 0; b < sizes.size(); ++b)
      if (bins[b].size() > 1 && (source == sizes.size() || sizes[b] >= sizes[source])) source = b;
    bins.push_back({bins[source].back()});
    bins[source].pop_back();
  }
  return bins;
}

TEST(BinCount, EqualsTheScan) {
  EXPECT_TRUE(rc::check("adjust_bin_count", [] {
    Bins bins;
    int64_t items = 0;
    for (size_t size : *rc::gen::container<std::vector<size_t>>(rc::gen::inRange<size_t>(1, 6))) {
      bins.emplace_back(size);
      std::iota(bins.back().begin(), bins.back().end(), items);
      items += std::ssize(bins.back());
    }
    const int64_t target = *rc::gen::inRange<int64_t>(std::ssize(bins), items + 1);
    RC_ASSERT(adjust_bin_count(bins, with_counts(1, target, 1)) ==
              adjust_bin_count_reference(bins, static_cast<size_t>(target)));
  }));
}

TEST(Balanced, SpreadsTheLongItems) {
  const Lengths lengths = {5, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  EXPECT_EQ(first_fit_decreasing(lengths, with_capacity(10))[0], (Bin{1, 0}));
  const BinMeasures measures = measure_bins(balanced_bins(lengths, with_capacity(10)), lengths, 10);
  EXPECT_EQ(measures.costs, (std::vector<double>{20, 20}));
}

TEST(Balanced, TakesTheNumberOfBinsOfTheBetterPacker) {
  const Lengths modified_needs_4 = {20, 13, 12, 10, 7, 5, 5, 4, 4},
                plain_needs_3 = {16, 15, 11, 6, 5, 4};
  EXPECT_EQ(balanced_bins(modified_needs_4, with_capacity(20)).size(), 4U);
  EXPECT_EQ(balanced_bins(modified_needs_4, with_counts(20, 0, 4)).size(), 4U);
  EXPECT_EQ(balanced_bins(plain_needs_3, with_capacity(20)).size(), 3U);
  // The modified packer's five bins would become eight, for which there are not enough items.
  const Lengths seven = {16, 11, 4, 17, 6, 15, 4};
  expect_usage(
      "7 items cannot fill 8 bins, one each at least (min_bin_count 0, bin_count_multiple 4); they "
      "need 5",
      [&] { modified_first_fit_decreasing(seven, with_counts(20, 0, 4)); });
  EXPECT_EQ(balanced_bins(seven, with_counts(20, 0, 4)).size(), 4U);
}

TEST(Balanced, StartsFromTheDecreasingPackingThatCostsLess) {
  // The greedy packing has room for all, but costs more, and the search does not mend it.
  const auto max_cost = [](const Lengths& lengths, int64_t capacity) {
    const BinOptions options = with_capacity(capacity);
    return measure_bins(balanced_bins(lengths, options), lengths, capacity).max_cost;
  };
  EXPECT_EQ(max_cost({13, 30, 24, 9, 21, 9}, 39), 465);  // as modified first fit
  EXPECT_LE(max_cost({12, 54, 8, 5, 11, 45, 30, 23, 13, 3, 13, 45, 24}, 73), 1578);  // first fit
}

TEST(Balanced, NeverCostsMoreThanADecreasingPackerWithAsManyBins) {
  EXPECT_TRUE(rc::check("no more bins than the better one, no larger cost", [] {
    Problem problem = draw_problem(*rc::gen::arbitrary<bool>());
    const auto& [lengths, options] = problem;
    problem.options.min_bin_count = std::min<int64_t>(options.min_bin_count, 3);
    problem.options.bin_count_multiple = 1;
    const auto measure = [&](const Bins& bins) {
      return measure_bins(bins, problem.lengths, problem.options.capacity);
    };
    const BinMeasures ours = measure(balanced_bins(lengths, options)),
                      ffd = measure(first_fit_decreasing(lengths, options)),
                      mffd = measure(modified_first_fit_decreasing(lengths, options));
    RC_ASSERT(ours.bins == std::min(ffd.bins, mffd.bins));
    RC_ASSERT(ours.bins < ffd.bins || ours.max_cost <= ffd.max_cost);
    RC_ASSERT(ours.bins < mffd.bins || ours.max_cost <= mffd.max_cost);
  }));
}

/// Largest cost of `balanced` over what no packing into as many bins can be below.
double over_bound(const Lengths& lengths, int64_t capacity) {
  const BinMeasures measures =
      measure_bins(balanced_bins(lengths, with_capacity(capacity)), lengths, capacity);
  const auto longest = static_cast<double>(*std::max_element(lengths.begin(), lengths.end()));
  return measures.max_cost / std::max(measures.mean_cost, longest * (longest + 1) / 2);
}

TEST(Balanced, IsNearTheBoundOnLongTailedDocuments) {
  for (int64_t capacity : {32768, 65536, 131072})
    for (uint64_t seed : {1, 2, 3})
      for (int64_t longest : {capacity, capacity / 4}) {
        LengthSpec spec;
        spec.count = 4096;
        spec.seed = seed;
        spec.max = longest;
        const Lengths lengths = draw_lengths(spec);
        EXPECT_LT(over_bound(lengths, capacity), 1.01) << capacity << ' ' << to_string(spec);
        if (longest == capacity) continue;
        const Bins decreasing = first_fit_decreasing(lengths, with_capacity(capacity));
        EXPECT_GT(measure_bins(decreasing, lengths, capacity).cost_imbalance, 2);
      }
}

TEST(Balanced, FillsBinsThatMustBeFullToTheLastSlot) {
  // The greedy start runs out of room here unless it places the shorter documents by room.
  const Lengths lengths = draw_lengths(parse_length_spec("count=100000,max=16K,seed=5"));
  EXPECT_GT(measure_bins(balanced_bins(lengths, with_capacity(65536)), lengths, 65536).utilisation,
            0.9997);
  EXPECT_LT(over_bound(lengths, 65536), 1.05);
}

TEST(Balanced, ExchangesItemsWhereThereIsNoRoomToDealAnew) {
  const Lengths lengths =
      draw_lengths(parse_length_spec("dist=uniform,count=4096,min=1000,max=9000,seed=2"));
  EXPECT_LT(over_bound(lengths, 65536), 1.05);
}

TEST(Measures, OfThreePackers) {
  const auto measure = [](Pack pack, int64_t capacity) {
    return measure_bins(pack(eight, with_capacity(capacity)), eight, capacity);
  };
  for (Pack pack :
       {Pack(next_fit), Pack(first_fit_decreasing), Pack(modified_first_fit_decreasing)}) {
    const BinMeasures m = measure(pack, 5);
    EXPECT_EQ(m.bins, 5);
    EXPECT_EQ(m.tokens, 23);
    EXPECT_EQ(m.padding, 0);
    EXPECT_EQ(m.waste, 2);
    EXPECT_DOUBLE_EQ(m.utilisation, 0.92);
    EXPECT_DOUBLE_EQ(m.waste_ratio, 1 - 0.92);
    EXPECT_DOUBLE_EQ(m.efficiency, 1);
  }
  EXPECT_NEAR(measure(next_fit, 5).balance, 0.8809, 5e-5);
  EXPECT_NEAR(measure(first_fit_decreasing, 5).balance, 0.8056, 5e-5);
  EXPECT_NEAR(measure(modified_first_fit_decreasing, 5).balance, 0.8809, 5e-5);

  const BinMeasures next = measure(next_fit, 8);
  EXPECT_EQ(next.bins, 4);
  EXPECT_NEAR(next.utilisation, 0.7188, 5e-5);
  EXPECT_DOUBLE_EQ(next.efficiency, 0.75);
  EXPECT_NEAR(next.balance, 0.7030, 5e-5);
  for (Pack pack : {Pack(first_fit_decreasing), Pack(modified_first_fit_decreasing)}) {
    EXPECT_EQ(measure(pack, 8).bins, 3);
    EXPECT_NEAR(measure(pack, 8).utilisation, 0.9583, 5e-5);
    EXPECT_DOUBLE_EQ(measure(pack, 8).efficiency, 1);
    EXPECT_NEAR(measure(pack, 8).balance, 0.9247, 5e-5);
  }
}

TEST(Measures, FullBinsCanCostVeryDifferently) {
  Lengths lengths(11, 10);
  lengths[0] = 100;
  const Bins bins = {{0}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}};
  const BinMeasures m = measure_bins(bins, lengths, 100);
  EXPECT_DOUBLE_EQ(m.utilisation, 1);
  EXPECT_DOUBLE_EQ(m.balance, 1);
  EXPECT_EQ(m.costs, (std::vector<double>{5050, 550}));
  EXPECT_DOUBLE_EQ(m.max_cost, 5050);
  EXPECT_DOUBLE_EQ(m.mean_cost, 2800);
  EXPECT_DOUBLE_EQ(m.cost_imbalance, 5050.0 / 2800);
}

TEST(Measures, RoundedLengthsArePaddingAndCostNoPairs) {
  const BinMeasures m = measure_bins(Bins{{0, 1}}, Lengths{3, 5}, 16, 4);
  EXPECT_EQ(m.tokens, 8);
  EXPECT_EQ(m.padding, 4);
  EXPECT_EQ(m.waste, 4);
  EXPECT_DOUBLE_EQ(m.utilisation, 0.75);
  EXPECT_EQ(m.costs, (std::vector<double>{6 + 15}));
}

TEST(Measures, EdgeCases) {
  const BinMeasures none = measure_bins({}, {}, 10);
  EXPECT_EQ(none.bins, 0);
  EXPECT_EQ(none.waste, 0);
  for (double value :
       {none.utilisation, none.waste_ratio, none.efficiency, none.balance, none.cost_imbalance})
    EXPECT_EQ(value, 0);
  const BinMeasures one = measure_bins(Bins{{0}}, Lengths{4}, 10);
  EXPECT_EQ(one.balance, 1);
  const BinMeasures empty = measure_bins(Bins{{0}, {1}}, Lengths{0, 0}, 10);
  EXPECT_EQ(empty.balance, 1);
  EXPECT_EQ(empty.cost_imbalance, 0);
  const BinMeasures oversize = measure_bins(Bins{{0}, {1}}, Lengths{30, 5}, 10);
  EXPECT_EQ(oversize.waste, 5);
  EXPECT_DOUBLE_EQ(oversize.utilisation, 35.0 / 40);
  EXPECT_DOUBLE_EQ(oversize.efficiency, 1);
  const BinMeasures uneven = measure_bins(Bins{{0}, {1}}, Lengths{10, 0}, 10);
  EXPECT_LT(uneven.balance, 0);
}

TEST(Ranks, BinsAreDealtRoundRobin) {
  EXPECT_EQ(assign_bins_to_ranks(6, 3),
            (std::vector<std::vector<int64_t>>{{0, 3}, {1, 4}, {2, 5}}));
  EXPECT_EQ(assign_bins_to_ranks(0, 2), (std::vector<std::vector<int64_t>>{{}, {}}));
}

TEST(Ranks, OptionsMakeTheNumberOfBinsFit) {
  const Lengths lengths(9, 10);
  for (int ranks : {1, 2, 3, 4, 5, 9}) {
    const BinOptions options = options_for_ranks(with_capacity(40), ranks);
    const Bins bins = first_fit_decreasing(lengths, options);
    const auto assigned = assign_bins_to_ranks(std::ssize(bins), ranks);
    EXPECT_EQ(std::ssize(assigned), ranks);
    EXPECT_FALSE(assigned.back().empty());
  }
}

TEST(Ranks, MinimumAndMultipleOfTheOptionsStillHold) {
  const BinOptions options = options_for_ranks(with_counts(40, 7, 6), 4);
  EXPECT_EQ(options.min_bin_count, 7);
  EXPECT_EQ(options.bin_count_multiple, 12);
}

TEST(Ranks, RefusesBinsThatDoNotDivide) {
  expect_usage("7 bins cannot be dealt evenly to 3 ranks; the nearest numbers of bins are 6 and 9",
               [] { assign_bins_to_ranks(7, 3); });
  expect_usage("bins cannot be dealt to 0 ranks; at least 1", [] { assign_bins_to_ranks(7, 0); });
  expect_usage("bins cannot be dealt to 0 ranks; at least 1", [] { options_for_ranks({}, 0); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
