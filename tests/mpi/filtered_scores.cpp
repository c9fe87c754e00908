// Log-probabilities under a sampling filter, and their gradients, against whole rows: any
// partition, list length and filter; ties, -inf, NaN, padding; rows that lists are too short for.

#include <rapidcheck.h>

#include <array>

#include "selection_operations.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test;

GYRE_TEST_OPERATION(FilteredLogprobs);

/// The results of this rank; by_digits() says how many rows were searched by digits.
OperationResult score(const LogitRows& rows, const Ints& targets, const VocabPartition& vocab,
                      DType type, const FilterOptions& options, Communicator& tp = world()) {
  const FilteredLogprobs o{rows, type, options, targets};
  return o.run({vocab, Place(), &tp});
}
int64_t by_digits(const OperationResult& got) {
  return static_cast<int64_t>(got.values[2][0]);
}

/// Compares the results of every partition with the reference.
void expect_as_reference_however_split(const LogitRows& rows, const Ints& targets, DType type,
                                       const FilterOptions& options) {
  const FilteredLogprobs o{rows, type, options, targets};
  for (const VocabPartition& vocab : partitions(rows.vocab_size, world().size()))
    o.expect_reference(o.run({vocab, Place()}), {vocab, Place()});
}

/// Targets all over the vocabulary, and some that nobody owns.
Ints random_targets(int64_t tokens, int64_t vocab_size) {
  Ints targets;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto bits = token_bits({5, TokenTensor::ids}, t, 0);
    targets.push_back(static_cast<int32_t>(bits % static_cast<uint64_t>(vocab_size + 2)) - 1);
  }
  return targets;
}

void round_to(LogitRows& rows, double step) {
  for (double& z : rows.values) z = std::round(z / step) * step;
}

/// Makes them values that the type holds.
void store_as(LogitRows& rows, DType type) {
  for (double& z : rows.values) {
    const auto x = static_cast<float>(z);
    z = static_cast<double>(type == DType::bf16 ? to_float(to_bf16(x)) : x);
  }
}

TEST(FilteredScores, AreThoseOfWholeRowsWhateverTheFilter) {
  EXPECT_TRUE(rc::check("any filter", [] {
    const int64_t vocab_size = *rc::gen::weightedOneOf<int64_t>(
        {{1, rc::gen::inRange<int64_t>(1, 12)}, {3, rc::gen::inRange<int64_t>(12, 400)}});
    const DType type = *rc::gen::element(DType::f32, DType::bf16);
    LogitRows rows =
        random_logits(*rc::gen::inRange<int64_t>(0, 5), vocab_size, type,
                      *rc::gen::element(0.1, 2.0, 20.0), *rc::gen::inRange<uint64_t>(0, 1000));
    if (*rc::gen::arbitrary<bool>()) round_to(rows, *rc::gen::element(0.0625, 1.0));
    if (*rc::gen::weightedElement<bool>({{3, false}, {1, true}}))
      for (double& z : rows.values)
        if (z < 0) z = -infinity;
    for (int64_t t = 0; t < rows.tokens; ++t) rows.at(t, (7 * t) % vocab_size) = 0.5;
    store_as(rows, type);
    const FilterOptions options = filter_of(
        *rc::gen::weightedOneOf<int64_t>(
            {{2, rc::gen::just<int64_t>(0)}, {2, rc::gen::inRange<int64_t>(1, vocab_size + 1)}}),
        *rc::gen::element(1.0, 1e-9, 0.3, 0.77, 0.9, 0.9999), *rc::gen::element(1, 2, 64),
        *rc::gen::element(1.0, 0.7, 2.5),
        *rc::gen::weightedOneOf<double>(
            {{2, rc::gen::just(0.0)}, {3, rc::gen::element(1e-20, 1e-3, 0.1, 0.6, 1.0)}}));
    const Ints targets =
        *rc::gen::arbitrary<bool>() ? random_targets(rows.tokens, vocab_size) : large_targets(rows);
    const VocabPartition vocab = *rc::gen::elementOf(partitions(vocab_size, world().size()));
    FilteredLogprobs o{rows, type, options, targets};
    if (vocab_size >= 20 && *rc::gen::arbitrary<bool>()) {
      o.filters = mixed_filters(rows.tokens);
      if (rows.tokens > 0) o.filters.back() = options.filter;
    }
    o.count_unclear(o.run({vocab, Place()}), {vocab, Place()});
    RC_ASSERT(!::testing::Test::HasFailure());
  }));
}

TEST(FilteredScores, FlatRowsAreSearchedByDigits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = random_logits(8, 3000, type, 0.1);
    for (int64_t v = 0; v < 3000; ++v) {
      rows.at(1, v) += 7;   // one exponent only
      rows.at(2, v) -= 90;  // negative
      rows.at(3, v) *= 100;
    }
    store_as(rows, type);
    for (const auto& [top_p, length] : {std::pair{0.2, 1}, {0.9, 16}, {0.999, 2}})
      expect_as_reference_however_split(rows, random_targets(8, 3000), type,
                                        filter_of(0, top_p, length, 1.5));
  }
}

TEST(FilteredScores, FlatRowsUnderMinPAreSearchedByDigits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = random_logits(6, 3000, type, 0.5);
    for (int64_t v = 0; v < 3000; ++v) rows.at(2, v) -= 90;
    store_as(rows, type);
    for (const auto& [top_p, min_p] : {std::pair{1.0, 0.1}, {0.6, 0.1}, {1.0, 1e-9}, {0.9, 1e-9}}) {
      const FilteredLogprobs o{rows, type, filter_of(0, top_p, 4, 1.5, min_p),
                               random_targets(6, 3000)};
      for (const VocabPartition& vocab : partitions(3000, world().size())) {
        const OperationResult got = o.run({vocab, Place()});
        EXPECT_EQ(by_digits(got), 6);
        EXPECT_LE(o.count_unclear(got, {vocab, Place()}), 1);
      }
    }
  }
}

TEST(FilteredScores, TokensMayHaveTheirOwnFilters) {
  const LogitRows rows = random_logits(16, 200, DType::f32, 2);
  FilteredLogprobs all{rows, DType::f32, filter_of(0, 1, 8), large_targets(rows)};
  all.filters = mixed_filters(16);
  for (const VocabPartition& vocab : partitions(200, world().size())) {
    const OperationResult got = all.run({vocab, Place()});
    for (int64_t t = 0; t < 16; ++t) {
      FilteredLogprobs one = all;
      one.options.filter = all.filters[t];
      one.filters.clear();
      const OperationResult same = one.run({vocab, Place()});
      EXPECT_EQ(got.values[1][t], same.values[1][t]) << t;
      // Digits sum in integers: the last bits differ from those of lists.
      if (got.values[0][t] != same.values[0][t]) {
        EXPECT_NEAR(got.values[0][t], same.values[0][t], 1e-5) << t;
      }
    }
  }
}

TEST(FilteredScores, ASearchCountsWhatLiesFarAboveItsRange) {
  LogitRows rows = random_logits(2, 3000, DType::bf16, 0.1);
  for (double& z : rows.values) z = 2 + std::abs(z);
  rows.at(0, 1234) = rows.at(0, 2999) = 7;
  rows.at(1, 0) = 7;
  store_as(rows, DType::bf16);
  const VocabPartition vocab = balanced_partition(3000, world().size());
  const OperationResult got = score(rows, {1234, 1}, vocab, DType::bf16, filter_of(0, 0.5, 2));
  EXPECT_EQ(by_digits(got), 2);
  if (world().size() > 1) {
    EXPECT_EQ(got.messages, 2 + 1);
  }
  expect_as_reference_however_split(rows, {1234, 1}, DType::bf16, filter_of(0, 0.5, 2));
}

TEST(FilteredScores, ZerosOfBothSignsAreTiesOfASearchToo) {
  LogitRows rows(4, 2000);
  for (int64_t t = 0; t < 4; ++t)
    for (int64_t v = 0; v < 2000; ++v)
      rows.at(t, v) = std::array{0.0, 0.0078125, -0.0, -0.0078125}[v % 4];
  for (const DType type : {DType::f32, DType::bf16})
    expect_as_reference_however_split(rows, {0, 2, 1998, 1000}, type, filter_of(0, 0.4567, 2));
}

TEST(FilteredScores, ListsMayLeaveOutOneColumn) {
  const LogitRows rows = random_logits(4, 10 * world().size(), DType::f32, 0.1);
  const VocabPartition vocab = balanced_partition(rows.vocab_size, world().size());
  for (const int64_t length : {9, 10, 11}) {
    const FilteredLogprobs o{rows, DType::f32, filter_of(0, 0.9999, length), {0, 1, 2, 3}};
    const OperationResult got = o.run({vocab, Place()});
    EXPECT_EQ(o.count_unclear(got, {vocab, Place()}), 0);
    EXPECT_EQ(by_digits(got), length == 9 ? 4 : 0);
  }
}

TEST(FilteredScores, TiesAtTheBoundaryOfASearchByDigits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = random_logits(12, 2000, type, 0.5);
    round_to(rows, 0.25);
    const FilterOptions options = filter_of(0, 0.8, 4);
    // Targets among the ties: the lowest that survives, and the one before it.
    Ints targets;
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const std::vector<bool> kept = filter_reference(rows.row(t), options.filter);
      double threshold = infinity;
      for (int64_t v = 0; v < 2000; ++v)
        if (kept[v]) threshold = std::min(threshold, rows.at(t, v));
      int32_t before = -1, first = -1;
      for (int32_t v = 0; v < 2000 && first < 0; ++v) {
        if (rows.at(t, v) != threshold) continue;
        if (kept[v]) first = v;
        if (first < 0) before = v;
      }
      targets.push_back(t % 2 == 0 ? first : before);
    }
    expect_as_reference_however_split(rows, targets, type, options);
  }
}

TEST(FilteredScores, TiesAtTheBoundaryGoToHigherIds) {
  const LogitRows rows(1, 4);  // four zeros
  for (const VocabPartition& vocab : partitions(4, world().size()))
    for (const int64_t length : {1, 2, 64})
      for (int32_t target = 0; target < 4; ++target) {
        const OperationResult half =
            score(rows, {target}, vocab, DType::f32, filter_of(0, 0.5, length));
        EXPECT_EQ(half.values[1], Floats{2});
        EXPECT_EQ(by_digits(half), 0);
        EXPECT_FLOAT_EQ(half.values[0][0], target < 2 ? -INFINITY : -std::log(2.0F)) << target;
        const OperationResult more =
            score(rows, {target}, vocab, DType::f32, filter_of(0, 0.6, length));
        EXPECT_EQ(more.values[1], Floats{3});
        EXPECT_FLOAT_EQ(more.values[0][0], target < 1 ? -INFINITY : -std::log(3.0F)) << target;
      }
}

/// Ramp 0 1 2 3 4.
LogitRows ramp(int64_t tokens) {
  LogitRows rows(tokens, 5);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t v = 0; v < 5; ++v) rows.at(t, v) = static_cast<double>(v);
  return rows;
}

TEST(FilteredScores, SmallRowsAreThoseOfTheReference) {
  const LogitRows golden = golden_logits();
  LogitRows ties(3, 5);
  for (int64_t t = 0; t < 3; ++t)
    for (int64_t v = 0; v < 5; ++v) ties.at(t, v) = v == 0 ? 1 : v == 4 ? 3 : 2;
  for (const DType type : both_types) {
    expect_as_reference_however_split(ties, {4, 2, 0}, type, filter_of(3, 1));
    // top_p acts on the renormalised survivors of top_k; a target that is dropped, or nobody's,
    // still pushes them down.
    for (const FilterOptions& options :
         {filter_of(0, 0.9), filter_of(3, 0.9), filter_of(2, 0.4), filter_of(2, 1)})
      expect_as_reference_however_split(ramp(8), {0, 1, 2, 3, 4, -1, 5, 900}, type, options);
    for (const auto& [top_k, top_p] : {std::pair{0, 1.0}, {10, 1.0}, {0, 0.9}, {10, 0.9}, {5, 0.5}})
      for (const int64_t length : {1, 2, 64})
        expect_as_reference_however_split(golden, golden_targets(), type,
                                          filter_of(top_k, top_p, length));
    LogitRows rows = random_logits(4, 60, type);  // top_k of the whole vocabulary drops nothing
    rows.at(1, 5) = -infinity;
    for (const FilterOptions& options : {filter_of(60, 1), filter_of(60, 0.7, 3), filter_of(59, 1)})
      expect_as_reference_however_split(rows, {1, 5, 3, -1}, type, options);
  }
}

TEST(FilteredScores, RowsWithFewerFiniteLogitsThanListsAreLong) {
  LogitRows rows(3, 50);
  std::fill(rows.values.begin(), rows.values.end(), -infinity);
  rows.at(0, 49) = -3;
  for (const int64_t v : {0, 20, 21}) rows.at(1, v) = 1 + 0.125 * static_cast<double>(v);
  for (int64_t v = 0; v < 50; v += 2) rows.at(2, v) = 4;
  for (const auto& [top_k, top_p] : {std::pair{0, 1.0}, {4, 1.0}, {0, 0.9}, {4, 0.9}})
    for (const int64_t length : {1, 8, 64})
      expect_as_reference_however_split(rows, {49, 21, 20}, DType::f32,
                                        filter_of(top_k, top_p, length));
}

TEST(FilteredScores, RowsThatAreNoDistributionAreNanOnAllRanksAndLeaveOthersAlone) {
  for (const double poison : {not_a_number, infinity}) {
    LogitRows rows = random_logits(5, 90, DType::f32, 0.1);
    const LogitRows clean = rows;
    rows.at(1, 3) = poison;
    rows.at(3, 88) = poison;
    std::fill_n(rows.values.begin() + 4 * 90, 90, -infinity);
    const Ints targets = {5, 6, 80, 88, 1};
    for (const VocabPartition& vocab : partitions(90, world().size()))
      for (const auto& [top_k, top_p] : {std::pair{0, 1.0}, {7, 1.0}, {0, 0.9}, {7, 0.9}}) {
        const FilterOptions options = filter_of(top_k, top_p, 2);
        const auto got = score(rows, targets, vocab, DType::f32, options).values;
        const auto want = score(clean, targets, vocab, DType::f32, options).values;
        for (const size_t t : {0, 2}) {
          EXPECT_EQ(got[0][t], want[0][t]);
          EXPECT_EQ(got[1][t], want[1][t]);
        }
        for (const size_t t : {1, 3, 4}) {
          EXPECT_TRUE(std::isnan(got[0][t])) << t;
          EXPECT_EQ(got[1][t], 0);
        }
      }
  }
}

TEST(FilteredScores, WithoutAFilterTheyAreVocabScores) {
  const LogitRows rows = random_logits(6, 300, DType::f32, 3);
  for (const VocabPartition& vocab : partitions(300, world().size())) {
    LogProbabilities plain("", rows, DType::f32, {1, false, 0.8});
    plain.ids = {0, 299, 150, 7, 8, 9};
    const OperationResult got = score(rows, plain.ids, vocab, DType::f32, filter_of(0, 1, 64, 0.8));
    EXPECT_EQ(got.values[0], plain.run({vocab, Place()}).values[0]);
    EXPECT_EQ(got.values[1], Floats(6, 300));
  }
}

TEST(FilteredScores, RowsAreScoredAsByThemselves) {
  const LogitRows rows = random_logits(10, 13, DType::f32);
  const FilteredLogprobs all{rows, DType::f32, {{4, 0.75, 1}, 2, 1}, large_targets(rows, 5)};
  const VocabPartition vocab = partitions(13, world().size()).back();
  const OperationResult whole = all.run({vocab, Place()});
  for (int64_t t = 0; t < 10; ++t) {
    FilteredLogprobs one = all;
    one.rows = LogitRows(1, 13);
    std::ranges::copy(rows.row(t), one.rows.values.begin());
    one.targets = {all.targets[t]};
    one.g = {all.g[t]};
    const OperationResult got = one.run({vocab, Place()});
    EXPECT_EQ(got.values[0][0], whole.values[0][t]);
    EXPECT_TRUE(
        std::ranges::equal(got.d_logits, row_of(whole.d_logits, t, vocab.columns(world().rank()))));
  }
}

TEST(FilteredScores, SearchesByDigitsGiveTheSameBitsForAnyNumberOfRanks) {
  const LogitRows rows = random_logits(6, 4000, DType::f32, 0.1);
  const FilterOptions options = filter_of(0, 0.6, 2);
  const auto alone = world().split(world().rank());
  const OperationResult one =
      score(rows, Ints(6, 9), balanced_partition(4000, 1), DType::f32, options, *alone);
  const OperationResult all =
      score(rows, Ints(6, 9), balanced_partition(4000, world().size()), DType::f32, options);
  EXPECT_EQ(by_digits(one), 6);
  EXPECT_EQ(all.values, one.values);
}

TEST(FilteredScores, RowsShareTheirRoundsAndTheirNumberIsBoundedByTheType) {
  const int n = world().size();
  if (n == 1) return;
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = random_logits(5, 2000, type, 0.1);
    round_to(rows, 0.0625);
    for (int64_t v = 0; v < 2000; ++v) rows.at(0, v) += 8;
    const VocabPartition vocab = balanced_partition(2000, n);
    const OperationResult got = score(rows, Ints(5, 0), vocab, type, filter_of(0, 0.9, 2));
    EXPECT_EQ(by_digits(got), 5);
    // Rows around 0 need all digits, one behind the other; the lists and the counts are one
    // collective each.
    EXPECT_EQ(got.messages, type == DType::f32 ? 2 + 4 : 2 + 2);
    rows.tokens = 1;
    rows.values.resize(2000);
    const OperationResult narrow = score(rows, {0}, vocab, type, filter_of(0, 0.9, 2));
    EXPECT_EQ(by_digits(narrow), 1);
    EXPECT_EQ(narrow.messages, type == DType::f32 ? 2 + 3 : 2 + 1);
  }
}

TEST(FilteredScores, SendThirtyTimesLessThanAnAllToAllOfTheLogits) {
  const int n = world().size();
  const int64_t vocab_size = 151936;
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = random_logits(2, vocab_size, type, 1);
    for (int64_t t = 0; t < 2; ++t)
      for (int64_t i = 0; i < 40; ++i) rows.at(t, (i * 4001) % vocab_size) = 16 + i % 8;
    const VocabPartition vocab = balanced_partition(vocab_size, n);
    const auto size = static_cast<int64_t>(size_of(type));
    const OperationResult top_p = score(rows, Ints(2, 4001), vocab, type, filter_of(0, 0.9, 64));
    const OperationResult top_k = score(rows, Ints(2, 4001), vocab, type, filter_of(64, 0.9, 1));
    EXPECT_EQ(by_digits(top_p), 0);
    for (const OperationResult* got : {&top_p, &top_k}) {
      EXPECT_EQ(got->bytes, (n - 1) * 2 * (64 * size + 16));
      EXPECT_EQ(got->messages, n == 1 ? 0 : 1);
      const int64_t all_to_all = 2 * vocab.columns(world().rank()) * size * (n - 1) / n;
      if (n == 8) {
        EXPECT_GE(all_to_all, 30 * got->bytes);
      }
    }
  }
}

TEST(FilteredScores, BadOptionsAreUsageErrorsOnAllRanks) {
  const int n = world().size();
  const VocabPartition vocab = balanced_partition(64, n);
  const auto message = [&](const FilterOptions& options, DType type = DType::f32) {
    return agreed_message([&] { FilteredScores(1, vocab, type, options, world()); });
  };
  EXPECT_EQ(message(filter_of(-1, 1)),
            "top_k is -1; the smallest valid number is 0, for no such filter");
  EXPECT_EQ(message(filter_of(65, 1)),
            "top_k is 65; the largest valid number is 64, the size of the vocabulary");
  EXPECT_EQ(message(filter_of(0, 0)), "top_p is 0; it must be above 0 and at most 1");
  EXPECT_EQ(message(filter_of(0, 1.5)), "top_p is 1.5; it must be above 0 and at most 1");
  EXPECT_EQ(message(filter_of(0, not_a_number)), "top_p is nan; it must be above 0 and at most 1");
  for (const double min_p : {-0.5, 1.5, not_a_number})
    EXPECT_EQ(message(filter_of(0, 1, 1, 1, min_p)),
              fmt::format("min_p is {}; it must be from 0, for no such filter, to 1", min_p));
  FilterOptions of_tokens = filter_of(0, 1);
  const std::vector<SamplingFilter> two(2), wrong{{.top_k = -2}};
  of_tokens.filters = two;
  EXPECT_EQ(message(of_tokens), "2 filters of 1 tokens; one for each, or none");
  of_tokens.filters = wrong;
  EXPECT_EQ(message(of_tokens), "top_k is -2; the smallest valid number is 0, for no such filter");
  EXPECT_EQ(message(filter_of(0, 1, 0)), "lists of 0 logits; the smallest valid length is 1");
  EXPECT_EQ(message(filter_of(0, 1), DType::f64), "logits of type f64; they must be f32 or bf16");
  for (const double temperature : {0.0, -1.0, infinity, 1e-60})
    EXPECT_EQ(message(filter_of(0, 1, 1, temperature)),
              fmt::format("a temperature of {}; it must be positive and finite, and so its inverse "
                          "in f32",
                          temperature));
  if (n == 1) return;
  const bool odd = world().rank() == 1;
  const std::string end = " on rank 1; it must be the same on all ranks of the group";
  EXPECT_EQ(message(filter_of(odd ? 3 : 2, 1)),
            "filtered log-probabilities: top_k is 2 on rank 0, but 3" + end);
  EXPECT_EQ(message(filter_of(0, odd ? 0.75 : 0.5)),
            "filtered log-probabilities: top_p is 0.5 on rank 0, but 0.75" + end);
  EXPECT_EQ(message(filter_of(0, 1, 1, 1, odd ? 0.25 : 0.5)),
            "filtered log-probabilities: min_p is 0.5 on rank 0, but 0.25" + end);
  const std::vector<SamplingFilter> one{{.top_k = odd ? 3 : 2}};
  of_tokens.filters = one;
  EXPECT_NE(message(of_tokens).find("the checksum of the tokens' filters is "), std::string::npos);
  EXPECT_EQ(message(filter_of(0, 1, 1, odd ? 2 : 1)),
            "filtered log-probabilities: the temperature is 1 on rank 0, but 2" + end);
  EXPECT_EQ(message(filter_of(0, 1, odd ? 2 : 1)),
            "filtered log-probabilities: the length of the lists is 1 on rank 0, but 2" + end);
}

}  // namespace GYRE_FILE
}  // namespace gyre
