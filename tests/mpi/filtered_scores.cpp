// Log-probabilities under a sampling filter, and their gradients, against whole rows: any
// partition, list length and filter; ties, -inf, NaN, padding; rows that lists are too short for.

#include "logprobs/filtered_scores.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "errors.hpp"
#include "logprob_cases.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "report/tolerance.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::LogitRows;
using test::Matrix;
using test::partitions;
using test::world;
using Targets = std::vector<int32_t>;
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

FilterOptions filter_of(int64_t top_k, double top_p, int64_t list_length = 64,
                        double temperature = 1) {
  return {{top_k, top_p, temperature}, list_length, 1};
}

/// What one rank gets.
struct Scores {
  std::vector<float> logprob;
  Targets kept;
  Matrix d_logits;
  int64_t by_digits;
  Traffic traffic;  // of the forward pass
};

/// Gradients of 1, -0.5, 1.25, -0.5, ... come from above.
double upstream(int64_t token) {
  return token % 2 == 1 ? -0.5 : 1 + 0.125 * static_cast<double>(token);
}

Scores score(const LogitRows& rows, const Targets& targets, const VocabPartition& vocab, DType type,
             const FilterOptions& options, Communicator& tp = world()) {
  const Matrix logits = rows.shard(vocab, tp.rank(), type);
  FilteredScores scores(rows.tokens, vocab, type, options, tp);
  const auto tokens = static_cast<size_t>(rows.tokens);
  Scores result{std::vector<float>(tokens), {}, logits, 0, {}};
  std::vector<float> g(tokens);
  for (size_t t = 0; t < tokens; ++t) g[t] = static_cast<float>(upstream(static_cast<int64_t>(t)));
  HostStream stream;
  const Traffic before = tp.traffic();
  scores.forward(logits.ref(), targets, stream, result.logprob);
  result.traffic = {tp.traffic().bytes_sent - before.bytes_sent,
                    tp.traffic().messages - before.messages};
  scores.backward(logits.ref(), targets, g, result.d_logits.ref());
  result.kept.assign(scores.survivors().begin(), scores.survivors().end());
  result.by_digits = scores.rows_by_digits();
  return result;
}

/// Whether the same columns survive when top_p is a little larger or smaller: rounding of the sums
/// may cross a boundary that is nearer than that.
bool is_clear(std::span<const double> row, SamplingFilter filter) {
  if (filter.top_p == 1) return true;
  constexpr double width = 1e-6;
  SamplingFilter more = filter, less = filter;
  more.top_p = std::min(filter.top_p * (1 + width), std::nextafter(1.0, 0.0));
  less.top_p = filter.top_p * (1 - width);
  return filter_reference(row, more) == filter_reference(row, less);
}

/// Whether lists of M are too short for the row: its threshold is below the M-th largest of some
/// shard that has more columns.
bool needs_digits(std::span<const double> row, const VocabPartition& vocab,
                  const FilterOptions& options) {
  if (options.filter.top_p == 1 ||
      (options.filter.top_k > 0 && options.filter.top_k < std::ssize(row)))
    return false;
  const std::vector<bool> kept = filter_reference(row, options.filter);
  double threshold = infinity;
  for (size_t v = 0; v < row.size(); ++v)
    if (kept[v]) threshold = std::min(threshold, row[v]);
  for (int r = 0; r < vocab.ranks(); ++r) {
    if (vocab.valid(r) <= options.list_length) continue;
    const auto shard =
        row.subspan(static_cast<size_t>(vocab.begin(r)), static_cast<size_t>(vocab.valid(r)));
    if (threshold < top_k_reference(shard, options.list_length).back().value) return true;
  }
  return false;
}

/// The worst error of a token's results, as a share of the tolerances.
double worst_error(const Scores& got, const LogitRows& rows, int64_t t, int64_t target,
                   const VocabPartition& vocab, DType type, const SamplingFilter& filter,
                   int rank) {
  const double want = filtered_logprob_reference(rows.row(t), target, filter);
  const auto logprob = static_cast<double>(got.logprob[static_cast<size_t>(t)]);
  double worst = 0;
  const auto add = [&](double x, double y, double tolerance) {
    if (x == y) return;
    const double share = std::abs(x - y) / tolerance;
    worst = std::isnan(share) ? infinity : std::max(worst, share);
  };
  add(logprob, want, logprob_tolerance() * logprob_scale(want));
  const double g = upstream(t), size = std::abs(g) / filter.temperature;
  const std::vector<double> gradient = filtered_gradient_reference(rows.row(t), target, filter, g);
  const std::vector<bool> kept = filter_reference(rows.row(t), filter);
  std::vector<double> left(rows.row(t).begin(), rows.row(t).end());
  for (size_t v = 0; v < left.size(); ++v)
    if (!kept[v]) left[v] = -infinity;
  const std::vector<double> logprobs = log_softmax_reference(left, filter.temperature);
  for (int64_t c = 0; c < vocab.columns(rank); ++c) {
    const int64_t v = vocab.begin(rank) + c;
    const double dz = got.d_logits.at(t, c);
    if (c >= vocab.valid(rank) || !kept[static_cast<size_t>(v)]) {
      add(dz, 0, 0);
      continue;
    }
    add(dz, gradient[static_cast<size_t>(v)],
        logit_gradient_tolerance(type) * logit_gradient_scale(logprobs[static_cast<size_t>(v)],
                                                              size, 0, v == target ? size : 0));
  }
  return worst;
}

int64_t survivors_of(std::span<const double> row, const SamplingFilter& filter) {
  const std::vector<bool> kept = filter_reference(row, filter);
  return std::count(kept.begin(), kept.end(), true);
}

/// Compares everything with whole rows. Returns how many rows were too near a boundary to be
/// compared.
int64_t expect_as_reference(const LogitRows& rows, const Targets& targets,
                            const VocabPartition& vocab, DType type, const FilterOptions& options) {
  const Scores got = score(rows, targets, vocab, type, options);
  int64_t unclear = 0, by_digits = 0;
  for (int64_t t = 0; t < rows.tokens; ++t) {
    if (!is_clear(rows.row(t), options.filter)) {
      ++unclear;
      continue;
    }
    by_digits += needs_digits(rows.row(t), vocab, options) ? 1 : 0;
    EXPECT_EQ(got.kept[static_cast<size_t>(t)], survivors_of(rows.row(t), options.filter));
    EXPECT_LE(worst_error(got, rows, t, targets[static_cast<size_t>(t)], vocab, type,
                          options.filter, world().rank()),
              1)
        << "token " << t << ", target " << targets[static_cast<size_t>(t)];
  }
  if (unclear == 0) {
    EXPECT_EQ(got.by_digits, by_digits);
  }
  // All ranks have the same bits.
  const auto* bits = reinterpret_cast<const char*>(got.logprob.data());
  const std::string mine(bits, bits + got.logprob.size() * sizeof(float));
  EXPECT_TRUE(broadcast_string(world(), mine, 0) == mine);
  EXPECT_EQ(all_reduce_value(world(), got.by_digits, ReduceOp::max), got.by_digits);
  return unclear;
}

/// The same for all partitions, and expects that nearly all rows were compared.
void expect_as_reference_however_split(const LogitRows& rows, const Targets& targets, DType type,
                                       const FilterOptions& options) {
  for (const VocabPartition& vocab : partitions(rows.vocab_size, world().size()))
    EXPECT_LE(expect_as_reference(rows, targets, vocab, type, options), rows.tokens / 8);
}

/// Targets all over the vocabulary, and some that nobody owns.
Targets random_targets(int64_t tokens, int64_t vocab_size) {
  Targets targets;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto bits = token_bits({5, TokenTensor::ids}, t, 0);
    targets.push_back(static_cast<int32_t>(bits % static_cast<uint64_t>(vocab_size + 2)) - 1);
  }
  return targets;
}
/// Of each row its i-th largest, i = 0, 1, 2, ..., 9, 0, ...
Targets large_targets(const LogitRows& rows) {
  Targets targets;
  for (int64_t t = 0; t < rows.tokens; ++t)
    targets.push_back(top_k_reference(rows.row(t), t % 10 + 1).back().id);
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
    LogitRows rows = test::random_logits(*rc::gen::inRange<int64_t>(0, 5), vocab_size, type,
                                         *rc::gen::element(0.1, 2.0, 20.0),
                                         *rc::gen::inRange<uint64_t>(0, 1000));
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
        *rc::gen::element(1.0, 0.7, 2.5));
    const Targets targets =
        *rc::gen::arbitrary<bool>() ? random_targets(rows.tokens, vocab_size) : large_targets(rows);
    const VocabPartition vocab = *rc::gen::elementOf(partitions(vocab_size, world().size()));
    expect_as_reference(rows, targets, vocab, type, options);
    RC_ASSERT(!::testing::Test::HasFailure());
  }));
}

TEST(FilteredScores, FlatRowsAreSearchedByDigits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = test::random_logits(8, 3000, type, 0.1);
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

TEST(FilteredScores, ASearchCountsWhatLiesFarAboveItsRange) {
  LogitRows rows = test::random_logits(2, 3000, DType::bf16, 0.1);
  for (double& z : rows.values) z = 2 + std::abs(z);
  rows.at(0, 1234) = rows.at(0, 2999) = 7;
  rows.at(1, 0) = 7;
  store_as(rows, DType::bf16);
  const VocabPartition vocab = balanced_partition(3000, world().size());
  const Scores got = score(rows, {1234, 1}, vocab, DType::bf16, filter_of(0, 0.5, 2));
  EXPECT_EQ(got.by_digits, 2);
  if (world().size() > 1) {
    EXPECT_EQ(got.traffic.messages, 2 + 1);
  }
  expect_as_reference_however_split(rows, {1234, 1}, DType::bf16, filter_of(0, 0.5, 2));
}

TEST(FilteredScores, ZerosOfBothSignsAreTiesOfASearchToo) {
  LogitRows rows(4, 2000);
  for (int64_t t = 0; t < 4; ++t)
    for (int64_t v = 0; v < 2000; ++v)
      rows.at(t, v) = std::array{0.0, 0.0078125, -0.0, -0.0078125}[static_cast<size_t>(v) % 4];
  for (const DType type : {DType::f32, DType::bf16})
    expect_as_reference_however_split(rows, {0, 2, 1998, 1000}, type, filter_of(0, 0.4567, 2));
}

TEST(FilteredScores, ListsMayLeaveOutOneColumn) {
  const LogitRows rows = test::random_logits(4, 10 * world().size(), DType::f32, 0.1);
  const VocabPartition vocab = balanced_partition(rows.vocab_size, world().size());
  for (const int64_t length : {9, 10, 11}) {
    const FilterOptions options = filter_of(0, 0.9999, length);
    EXPECT_EQ(expect_as_reference(rows, {0, 1, 2, 3}, vocab, DType::f32, options), 0);
    EXPECT_EQ(score(rows, {0, 1, 2, 3}, vocab, DType::f32, options).by_digits, length == 9 ? 4 : 0);
  }
}

TEST(FilteredScores, TiesAtTheBoundaryOfASearchByDigits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = test::random_logits(12, 2000, type, 0.5);
    round_to(rows, 0.25);
    const FilterOptions options = filter_of(0, 0.8, 4);
    // Targets among the ties: the lowest that survives, and the one before it.
    Targets targets;
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const std::vector<bool> kept = filter_reference(rows.row(t), options.filter);
      double threshold = infinity;
      for (int64_t v = 0; v < 2000; ++v)
        if (kept[static_cast<size_t>(v)]) threshold = std::min(threshold, rows.at(t, v));
      int32_t before = -1, first = -1;
      for (int32_t v = 0; v < 2000 && first < 0; ++v) {
        if (rows.at(t, v) != threshold) continue;
        if (kept[static_cast<size_t>(v)]) first = v;
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
        const Scores half = score(rows, {target}, vocab, DType::f32, filter_of(0, 0.5, length));
        EXPECT_EQ(half.kept, Targets{2});
        EXPECT_EQ(half.by_digits, 0);
        EXPECT_FLOAT_EQ(half.logprob[0], target < 2 ? -INFINITY : -std::log(2.0F)) << target;
        const Scores more = score(rows, {target}, vocab, DType::f32, filter_of(0, 0.6, length));
        EXPECT_EQ(more.kept, Targets{3});
        EXPECT_FLOAT_EQ(more.logprob[0], target < 1 ? -INFINITY : -std::log(3.0F)) << target;
      }
}

TEST(FilteredScores, AllTiesOfTheKthSurvive) {
  LogitRows rows(3, 5);
  for (int64_t t = 0; t < 3; ++t)
    for (int64_t v = 0; v < 5; ++v) rows.at(t, v) = v == 0 ? 1 : v == 4 ? 3 : 2;
  for (const VocabPartition& vocab : partitions(5, world().size())) {
    const Scores got = score(rows, {4, 2, 0}, vocab, DType::bf16, filter_of(3, 1));
    EXPECT_EQ(got.kept, (Targets{4, 4, 4}));
    EXPECT_NEAR(got.logprob[0], -0.743668381, logprob_tolerance());
    EXPECT_NEAR(got.logprob[1], -1.743668381, 2 * logprob_tolerance());
    EXPECT_EQ(got.logprob[2], -INFINITY);
  }
}

/// Ramp 0 1 2 3 4.
LogitRows ramp(int64_t tokens) {
  LogitRows rows(tokens, 5);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t v = 0; v < 5; ++v) rows.at(t, v) = static_cast<double>(v);
  return rows;
}

TEST(FilteredScores, TopPActsOnTheRenormalisedSurvivorsOfTopK) {
  const Targets all = {0, 1, 2, 3, 4};
  for (const VocabPartition& vocab : partitions(5, world().size())) {
    EXPECT_EQ(score(ramp(5), all, vocab, DType::f32, filter_of(0, 0.9)).kept, Targets(5, 3));
    const Scores both = score(ramp(5), all, vocab, DType::f32, filter_of(3, 0.9));
    EXPECT_EQ(both.kept, Targets(5, 2));
    EXPECT_EQ(both.logprob[2], -INFINITY);
    EXPECT_NEAR(both.logprob[3], -1.313261688, 2 * logprob_tolerance());
    EXPECT_NEAR(both.logprob[4], -0.313261688, logprob_tolerance());
    const Scores one = score(ramp(5), all, vocab, DType::f32, filter_of(2, 0.5));
    EXPECT_EQ(one.kept, Targets(5, 1));
    EXPECT_EQ(one.logprob[4], 0);
  }
}

TEST(FilteredScores, ADroppedTargetStillPushesTheSurvivorsDown) {
  const std::vector<double> want = {0, 0, 0, -0.268941421, -0.731058579};
  for (const VocabPartition& vocab : partitions(5, world().size()))
    for (const int32_t target : {0, -1, 5, 900}) {
      const Scores got = score(ramp(1), {target}, vocab, DType::f32, filter_of(2, 1));
      EXPECT_EQ(got.logprob[0], -INFINITY);
      for (int64_t c = 0; c < vocab.valid(world().rank()); ++c)
        EXPECT_NEAR(got.d_logits.at(0, c),
                    want[static_cast<size_t>(vocab.begin(world().rank()) + c)],
                    logit_gradient_tolerance(DType::f32));
    }
}

TEST(FilteredScores, GoldenValuesAndCounts) {
  const Targets ids = {57, 55, 19, 57, 38, 36, 57, 55};
  LogitRows rows = test::golden_logits();
  rows.tokens = 8;
  rows.values.resize(8 * 64);
  struct Case {
    FilterOptions options;
    std::vector<double> logprob;
    Targets kept;
  };
  const std::vector<Case> cases = {{filter_of(0, 1),
                                    {-1.748163688, -1.950016135, -2.042737857, -2.283393937,
                                     -2.462148456, -2.651064173, -2.784641104, -3.095435309},
                                    Targets(8, 64)},
                                   {filter_of(10, 1),
                                    {-1.590189817, -1.790390795, -1.885388871, -2.115977590,
                                     -2.306783966, -2.490977590, -2.606760206, -2.940322503},
                                    Targets(8, 10)},
                                   {filter_of(0, 0.9),
                                    {-1.644316089, -1.847203671, -1.953223396, -2.193949773,
                                     -2.374777713, -2.561141136, -2.686609640, -2.992204844},
                                    {12, 12, 13, 13, 13, 13, 13, 12}},
                                   {filter_of(10, 0.9),
                                    {-1.500657778, -1.707621019, -1.804886470, -2.033830664,
                                     -2.225416270, -2.408830664, -2.512239133, -2.853717082},
                                    Targets(8, 8)},
                                   {filter_of(5, 0.5),
                                    {-0.632599035, -0.825939420, -infinity, -infinity, -infinity,
                                     -infinity, -infinity, -infinity},
                                    {2, 2, 2, 3, 3, 3, 3, 2}}};
  for (const DType type : {DType::f32, DType::bf16})
    for (const VocabPartition& vocab : partitions(64, world().size()))
      for (const Case& c : cases)
        for (const int64_t length : {1, 2, 64}) {
          FilterOptions options = c.options;
          options.list_length = length;
          const Scores got = score(rows, ids, vocab, type, options);
          EXPECT_EQ(got.kept, c.kept);
          for (size_t t = 0; t < 8; ++t) {
            const auto logprob = static_cast<double>(got.logprob[t]);
            if (logprob == c.logprob[t]) continue;
            EXPECT_NEAR(logprob, c.logprob[t], logprob_tolerance() * logprob_scale(logprob));
          }
        }
}

TEST(FilteredScores, ShapesThatUpstreamTests) {
  for (const auto& [top_k, top_p] : {std::pair{0, 1.0}, {10, 1.0}, {0, 0.9}, {10, 0.9}}) {
    const LogitRows rows = test::random_logits(2 * 4, 100, DType::f32, 1);
    expect_as_reference_however_split(rows, large_targets(rows), DType::f32,
                                      filter_of(top_k, top_p));
  }
  for (const auto& [top_k, top_p] : {std::pair{100, 0.9}, {0, 0.9}, {100, 1.0}, {0, 1.0}}) {
    const LogitRows rows = test::random_logits(4 * 2, 1000, DType::f32, 1);
    expect_as_reference_however_split(rows, random_targets(8, 1000), DType::f32,
                                      filter_of(top_k, top_p));
  }
  for (const auto& [top_k, top_p] : {std::pair{10, 1.0}, {0, 0.9}, {10, 0.9}}) {
    const LogitRows rows = test::random_logits(4 * 16, 256, DType::f32, 1);
    expect_as_reference_however_split(rows, large_targets(rows), DType::f32,
                                      filter_of(top_k, top_p));
  }
}

TEST(FilteredScores, TopKOfTheWholeVocabularyDropsNothing) {
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = test::random_logits(4, 60, type);
    rows.at(1, 5) = -infinity;
    expect_as_reference_however_split(rows, {1, 5, 3, -1}, type, filter_of(60, 1));
    expect_as_reference_however_split(rows, {1, 5, 3, -1}, type, filter_of(60, 0.7, 3));
    expect_as_reference_however_split(rows, {1, 5, 3, -1}, type, filter_of(59, 1));
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
    LogitRows rows = test::random_logits(5, 90, DType::f32, 0.1);
    const LogitRows clean = rows;
    rows.at(1, 3) = poison;
    rows.at(3, 88) = poison;
    std::fill_n(rows.values.begin() + 4 * 90, 90, -infinity);
    const Targets targets = {5, 6, 80, 88, 1};
    for (const VocabPartition& vocab : partitions(90, world().size()))
      for (const auto& [top_k, top_p] : {std::pair{0, 1.0}, {7, 1.0}, {0, 0.9}, {7, 0.9}}) {
        const FilterOptions options = filter_of(top_k, top_p, 2);
        const Scores got = score(rows, targets, vocab, DType::f32, options);
        const Scores want = score(clean, targets, vocab, DType::f32, options);
        for (const size_t t : {0, 2}) {
          EXPECT_EQ(got.logprob[t], want.logprob[t]);
          EXPECT_EQ(got.kept[t], want.kept[t]);
        }
        for (const size_t t : {1, 3, 4}) {
          EXPECT_TRUE(std::isnan(got.logprob[t])) << t;
          EXPECT_EQ(got.kept[t], 0);
        }
      }
  }
}

TEST(FilteredScores, WithoutAFilterTheyAreVocabScores) {
  const LogitRows rows = test::random_logits(6, 300, DType::f32, 3);
  const Targets targets = {0, 299, 150, 7, 8, 9};
  for (const VocabPartition& vocab : partitions(300, world().size())) {
    const Scores got = score(rows, targets, vocab, DType::f32, filter_of(0, 1, 64, 0.8));
    EXPECT_EQ(got.kept, Targets(6, 300));
    const Matrix logits = rows.shard(vocab, world().rank(), DType::f32);
    ScoreOptions options;
    options.temperature = 0.8;
    VocabScores plain(6, vocab, options, world());
    std::vector<float> logprob(6);
    HostStream stream;
    plain.forward(logits.ref(), targets, stream, logprob, {});
    EXPECT_EQ(got.logprob, logprob);
    // A record is a list of one and 16 bytes.
    EXPECT_EQ(got.traffic.bytes_sent, (world().size() - 1) * 6 * 20);
  }
}

TEST(FilteredScores, GradientsAreThoseOfFiniteDifferences) {
  const double h = 1e-3;
  LogitRows rows = test::random_logits(1, 48, DType::f32, 1);
  const VocabPartition vocab = balanced_partition(48, world().size());
  for (const FilterOptions& options : {filter_of(0, 0.8, 3, 1.3), filter_of(20, 0.7, 3, 1.3)}) {
    const std::vector<bool> kept = filter_reference(rows.row(0), options.filter);
    const int32_t target = top_k_reference(rows.row(0), 3).back().id;
    const Scores got = score(rows, {target}, vocab, DType::f32, options);
    for (int64_t c = 0; c < vocab.valid(world().rank()); ++c) {
      const int64_t v = vocab.begin(world().rank()) + c;
      const double log_p = filtered_logprob_reference(rows.row(0), v, options.filter);
      double difference = 0;
      for (const double sign : {1.0, -1.0}) {
        LogitRows moved = rows;
        moved.at(0, v) += sign * h;
        EXPECT_TRUE(filter_reference(moved.row(0), options.filter) == kept) << "a bad example";
        difference += sign * filtered_logprob_reference(moved.row(0), target, options.filter);
      }
      EXPECT_NEAR(got.d_logits.at(0, c), upstream(0) * difference / (2 * h),
                  logit_gradient_tolerance(DType::f32) *
                      logit_gradient_scale(log_p, 1, 0, v == target ? 1 : 0));
    }
  }
}

TEST(FilteredScores, DoNotDependOnRanksNorThreads) {
  LogitRows rows = test::random_logits(70, 1000, DType::bf16, 1.5);
  const Targets targets = large_targets(rows);
  const auto alone = world().split(world().rank());
  for (const int64_t length : {2, 64}) {
    FilterOptions options = filter_of(0, 0.85, length);
    const Scores one =
        score(rows, targets, balanced_partition(1000, 1), DType::bf16, options, *alone);
    for (const VocabPartition& vocab : partitions(1000, world().size())) {
      options.threads = 1;
      const Scores all = score(rows, targets, vocab, DType::bf16, options);
      EXPECT_EQ(all.kept, one.kept);
      for (size_t t = 0; t < all.logprob.size(); ++t) {
        const auto want = static_cast<double>(one.logprob[t]);
        if (all.logprob[t] == one.logprob[t]) continue;
        EXPECT_NEAR(all.logprob[t], want, logprob_tolerance() * logprob_scale(want));
      }
      options.threads = 3;
      const Scores threaded = score(rows, targets, vocab, DType::bf16, options);
      EXPECT_EQ(all.logprob, threaded.logprob);
      EXPECT_EQ(all.kept, threaded.kept);
    }
  }
}

TEST(FilteredScores, SearchesByDigitsGiveTheSameBitsForAnyNumberOfRanks) {
  const LogitRows rows = test::random_logits(6, 4000, DType::f32, 0.1);
  const FilterOptions options = filter_of(0, 0.6, 2);
  const auto alone = world().split(world().rank());
  const Scores one =
      score(rows, Targets(6, 9), balanced_partition(4000, 1), DType::f32, options, *alone);
  const Scores all =
      score(rows, Targets(6, 9), balanced_partition(4000, world().size()), DType::f32, options);
  EXPECT_EQ(one.by_digits, 6);
  EXPECT_EQ(all.by_digits, 6);
  EXPECT_EQ(all.kept, one.kept);
  EXPECT_EQ(all.logprob, one.logprob);
}

TEST(FilteredScores, RowsShareTheirRoundsAndTheirNumberIsBoundedByTheType) {
  const int n = world().size();
  if (n == 1) return;
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = test::random_logits(5, 2000, type, 0.1);
    round_to(rows, 0.0625);
    for (int64_t v = 0; v < 2000; ++v) rows.at(0, v) += 8;
    const VocabPartition vocab = balanced_partition(2000, n);
    const Scores got = score(rows, Targets(5, 0), vocab, type, filter_of(0, 0.9, 2));
    EXPECT_EQ(got.by_digits, 5);
    // Rows around 0 need all digits, one behind the other; the lists and the counts are one
    // collective each.
    EXPECT_EQ(got.traffic.messages, type == DType::f32 ? 2 + 4 : 2 + 2);
    rows.tokens = 1;
    rows.values.resize(2000);
    const Scores narrow = score(rows, {0}, vocab, type, filter_of(0, 0.9, 2));
    EXPECT_EQ(narrow.by_digits, 1);
    EXPECT_EQ(narrow.traffic.messages, type == DType::f32 ? 2 + 3 : 2 + 1);
  }
}

TEST(FilteredScores, SendThirtyTimesLessThanAnAllToAllOfTheLogits) {
  const int n = world().size();
  const int64_t vocab_size = 151936;
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = test::random_logits(2, vocab_size, type, 1);
    for (int64_t t = 0; t < 2; ++t)
      for (int64_t i = 0; i < 40; ++i) rows.at(t, (i * 4001) % vocab_size) = 16 + i % 8;
    const VocabPartition vocab = balanced_partition(vocab_size, n);
    const auto size = static_cast<int64_t>(size_of(type));
    const Scores top_p = score(rows, Targets(2, 4001), vocab, type, filter_of(0, 0.9, 64));
    const Scores top_k = score(rows, Targets(2, 4001), vocab, type, filter_of(64, 0.9, 1));
    EXPECT_EQ(top_p.by_digits, 0);
    for (const Scores* got : {&top_p, &top_k}) {
      EXPECT_EQ(got->traffic.bytes_sent, (n - 1) * 2 * (64 * size + 16));
      EXPECT_EQ(got->traffic.messages, n == 1 ? 0 : 1);
      const int64_t all_to_all = 2 * vocab.columns(world().rank()) * size * (n - 1) / n;
      if (n == 8) {
        EXPECT_GE(all_to_all, 30 * got->traffic.bytes_sent);
      }
    }
  }
}

TEST(FilteredScores, GradientsMayTakeTheMemoryOfTheLogits) {
  const LogitRows rows = test::random_logits(3, 100, DType::bf16);
  const VocabPartition vocab = balanced_partition(100, world().size());
  const Targets targets = large_targets(rows);
  const Scores want = score(rows, targets, vocab, DType::bf16, filter_of(0, 0.9, 4));
  Matrix logits = rows.shard(vocab, world().rank(), DType::bf16);
  FilteredScores scores(3, vocab, DType::bf16, filter_of(0, 0.9, 4), world());
  std::vector<float> logprob(3), g;
  for (int64_t t = 0; t < 3; ++t) g.push_back(static_cast<float>(upstream(t)));
  HostStream stream;
  scores.forward(logits.ref(), targets, stream, logprob);
  scores.backward(logits.ref(), targets, g, logits.ref());
  for (int64_t t = 0; t < 3; ++t)
    for (int64_t c = 0; c < logits.cols(); ++c) EXPECT_EQ(logits.at(t, c), want.d_logits.at(t, c));
}

TEST(FilteredScores, BadArgumentsAreUsageErrorsOnAllRanks) {
  const int n = world().size();
  const VocabPartition vocab = balanced_partition(64, n);
  const auto message = [&](const FilterOptions& options, int64_t tokens = 1,
                           DType type = DType::f32) {
    return agreed_message([&] { FilteredScores(tokens, vocab, type, options, world()); });
  };
  EXPECT_EQ(message(filter_of(-1, 1)),
            "top_k is -1; the smallest valid number is 0, for no such filter");
  EXPECT_EQ(message(filter_of(65, 1)),
            "top_k is 65; the largest valid number is 64, the size of the vocabulary");
  EXPECT_EQ(message(filter_of(0, 0)), "top_p is 0; it must be above 0 and at most 1");
  EXPECT_EQ(message(filter_of(0, 1.5)), "top_p is 1.5; it must be above 0 and at most 1");
  EXPECT_EQ(message(filter_of(0, not_a_number)), "top_p is nan; it must be above 0 and at most 1");
  EXPECT_EQ(message(filter_of(0, 1, 0)), "lists of 0 logits; the smallest valid length is 1");
  EXPECT_EQ(message(filter_of(0, 1), -1), "-1 tokens; the fewest are 0");
  EXPECT_EQ(message(filter_of(0, 1), 1, DType::f64),
            "logits of type f64; they must be f32 or bf16");
  for (const double temperature : {0.0, -1.0, infinity, 1e-60})
    EXPECT_EQ(message(filter_of(0, 1, 1, temperature)),
              fmt::format("a temperature of {}; it must be positive and finite, and so its inverse "
                          "in f32",
                          temperature));
  EXPECT_EQ(agreed_message([&] {
              FilteredScores(1, balanced_partition(64, n + 1), DType::f32, filter_of(0, 1),
                             world());
            }),
            fmt::format("a vocabulary in {} shards for a group of {} ranks; it must be one shard a "
                        "rank",
                        n + 1, n));
  if (n == 1) return;
  const bool odd = world().rank() == 1;
  const std::string end = " on rank 1; it must be the same on all ranks of the group";
  EXPECT_EQ(message(filter_of(odd ? 3 : 2, 1)),
            "filtered log-probabilities: top_k is 2 on rank 0, but 3" + end);
  EXPECT_EQ(message(filter_of(0, odd ? 0.75 : 0.5)),
            "filtered log-probabilities: top_p is 0.5 on rank 0, but 0.75" + end);
  EXPECT_EQ(message(filter_of(0, 1, 1, odd ? 2 : 1)),
            "filtered log-probabilities: the temperature is 1 on rank 0, but 2" + end);
  EXPECT_EQ(message(filter_of(0, 1, odd ? 2 : 1)),
            "filtered log-probabilities: the length of the lists is 1 on rank 0, but 2" + end);
}

}  // namespace GYRE_FILE
}  // namespace gyre
