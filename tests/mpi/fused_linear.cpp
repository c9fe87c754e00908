// The fused linear layer over all ranks, against whole logits in double precision.

#include "logprobs/fused_linear/fused_linear.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "comm/process_grid.hpp"
#include "errors.hpp"
#include "layout_cases.hpp"
#include "linear_cases.hpp"
#include "logprobs/sequence_scores.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::world;
using namespace test::linear;

Result run(const Problem& p, const LinearOptions& options, const VocabPartition& vocab,
           Communicator& tp) {
  FusedLinear fused(options, vocab, tp);
  const test::Matrix x = rows_of(p, fused.first_row(tp.rank()), fused.rows()),
                     weight = weight_of(p, vocab, tp.rank());
  const int64_t tokens = p.tokens;
  Result result{Floats(tokens, NAN), Floats(options.entropy ? tokens : 0, NAN),
                test::Matrix(fused.rows(), p.hidden, DType::f32),
                test::Matrix(vocab.columns(tp.rank()), p.hidden, DType::f32)};
  HostStream host;
  fused.forward(x.ref(), weight.ref(), p.targets, host, result.logprob, result.entropy);
  fused.backward(x.ref(), weight.ref(), p.targets,
                 {p.d_logprob,
                  options.entropy ? std::span<const float>(p.d_entropy) : std::span<const float>{},
                  result.d_x.ref().as<float>(), result.d_weight.ref().as<float>()},
                 host);
  return result;
}

const Layer layer = {[](const Problem& p, const LinearOptions& options, const VocabPartition& vocab,
                        DType, DType) { return run(p, options, vocab, world()); }};

TEST(FusedLinear, MatchesReferenceForAllPartitionsAndTiles) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool sharded : {true, false}) {
      Problem p = make_problem(19, 24, 53, type, sharded ? 1 : 1.7);
      if (sharded) p.temperatures = test::own_temperatures(p.tokens);
      for (const VocabPartition& vocab : test::partitions(p.vocab_size, world().size()))
        for (const auto& [rows, columns] :
             {std::pair<int64_t, int64_t>{0, 0}, {1, 1}, {3, 5}, {7, 64}}) {
          LinearOptions options = options_of(p, sharded);
          options.entropy = columns != 5;
          options.tile_rows = rows;
          options.tile_columns = columns;
          layer.expect_reference(p, options, vocab);
        }
    }
}

TEST(FusedLinear, MatchesReferenceForFewTokensAndNoneAndEmptyShards) {
  layer.expect_few_tokens_and_empty_shards();
}

TEST(FusedLinear, BitsAreTheSameOnAllRanksInASecondRunAndForAnyThreads) {
  layer.expect_same_bits(make_problem(150, 130, 1000, DType::f32), 80, 200, {1, 2, 3, 7});
}

TEST(FusedLinear, TokensWithoutGradientTakeNoPartWhateverTheyHold) {
  layer.expect_no_part_of_tokens_without_gradient(20, 4);
}

TEST(FusedLinear, MatchesReferenceForLongDotProductsAndManyColumns) {
  const Problem p = make_problem(90, 300, 700, DType::bf16);
  LinearOptions options = options_of(p);
  options.entropy = true;
  options.tile_rows = 70;
  options.tile_columns = 130;
  options.threads = 2;
  layer.expect_reference(p, options, test::partitions(p.vocab_size, world().size())[0]);
}

TEST(FusedLinear, IsUsedAgainAndWithArraysWithoutGaps) {
  const VocabPartition vocab = balanced_partition(30, world().size());
  for (const bool sharded : {true, false}) {
    Problem p = make_problem(17, 8, 30, DType::f32);
    FusedLinear fused(options_of(p, sharded), vocab, world());
    const test::Matrix weight = weight_of(p, vocab, world().rank());
    for (const double factor : {1.0, 0.5}) {
      for (double& x : p.x.values) x *= factor;
      const test::Matrix x = rows_of(p, fused.first_row(world().rank()), fused.rows());
      Floats logprob(17);
      Buffer<float> d_x(fused.rows() * 8), d_weight(weight.rows() * 8);
      HostStream host;
      fused.forward(x.ref(), weight.ref(), p.targets, host, logprob, {});
      fused.backward(
          x.ref(), weight.ref(), p.targets,
          {p.d_logprob, {}, d_x.matrix(fused.rows(), 8), d_weight.matrix(weight.rows(), 8)}, host);
      const Result with_gaps = run(p, options_of(p, sharded), vocab, world());
      EXPECT_EQ(logprob, with_gaps.logprob);
      for (int64_t d = 0; d < 8; ++d) {
        for (int64_t r = 0; r < fused.rows(); ++r)
          EXPECT_EQ(static_cast<double>(d_x[8 * r + d]), with_gaps.d_x.at(r, d));
        for (int64_t r = 0; r < weight.rows(); ++r)
          EXPECT_EQ(static_cast<double>(d_weight[8 * r + d]), with_gaps.d_weight.at(r, d));
      }
    }
  }
}

TEST(FusedLinear, AccumulatesIntoTheWeightsGradient) {
  const Problem p = make_problem(11, 6, 40, DType::f32);
  const VocabPartition vocab = test::partitions(40, world().size())[0];
  FusedLinear fused(options_of(p), vocab, world());
  const test::Matrix x = rows_of(p, fused.first_row(world().rank()), fused.rows()),
                     weight = weight_of(p, vocab, world().rank());
  test::Matrix d_x(fused.rows(), 6, DType::f32), once(weight.rows(), 6, DType::f32),
      twice(weight.rows(), 6, DType::f32);
  Floats logprob(11);
  HostStream host;
  fused.forward(x.ref(), weight.ref(), p.targets, host, logprob, {});
  const auto backward = [&](test::Matrix& d_weight, bool accumulate) {
    fused.backward(x.ref(), weight.ref(), p.targets,
                   {p.d_logprob, {}, d_x.ref().as<float>(), d_weight.ref().as<float>(), accumulate},
                   host);
  };
  backward(once, false);
  for (int64_t r = 0; r < twice.rows(); ++r)
    for (int64_t d = 0; d < 6; ++d) twice.set(r, d, 1000);
  backward(twice, true);
  for (int64_t r = 0; r < twice.rows(); ++r)
    for (int64_t d = 0; d < 6; ++d)  // rounded at the size of 1000 by every tile
      EXPECT_NEAR(twice.at(r, d), 1000 + once.at(r, d), 1000 * tolerance_for(DType::f32, 1));
  const Floats zeros(11, 0.0F);
  fused.backward(x.ref(), weight.ref(), p.targets,
                 {zeros, {}, d_x.ref().as<float>(), twice.ref().as<float>(), false}, host);
  for (int64_t r = 0; r < twice.rows(); ++r)
    for (int64_t d = 0; d < 6; ++d) EXPECT_EQ(twice.at(r, d), 0);
  for (int64_t r = 0; r < d_x.rows(); ++r)
    for (int64_t d = 0; d < 6; ++d) EXPECT_EQ(d_x.at(r, d), 0);
}

TEST(FusedLinear, GradientsOfTargetsThatNobodyHasCount) {
  Problem p = make_problem(8, 6, 30, DType::f32);
  p.targets[2] = -1;
  p.targets[5] = 30;
  p.targets[6] = 31;
  for (const VocabPartition& vocab : test::partitions(30, world().size()))
    layer.expect_reference(p, options_of(p), vocab);
}

TEST(FusedLinear, BadNumbersMakeTheirRowsNanOnAllRanks) {
  for (const double bad : {quiet_nan, 1e38}) {  // 1e38 · |w| overflows to infinities and NaN
    Problem p = make_problem(12, 6, 40, DType::f32);
    for (int64_t d = 0; d < 6; ++d) p.x.at(7, d) = bad;
    for (int64_t v = 0; v < 40; ++v) p.weight.at(v, 0) = 4 + static_cast<double>(v);
    for (const int64_t columns : {0, 1}) {
      LinearOptions options = options_of(p);
      options.entropy = true;
      options.tile_columns = columns;
      const Result got = run(p, options, test::partitions(40, world().size())[2], world());
      for (size_t t = 0; t < 12; ++t) {
        EXPECT_EQ(std::isnan(got.logprob[t]), t == 7) << bad << ", token " << t;
        EXPECT_EQ(std::isnan(got.entropy[t]), t == 7) << bad << ", token " << t;
      }
    }
  }
  Problem p = make_problem(12, 6, 40, DType::f32);
  p.weight.at(33, 2) = quiet_nan;  // one column: of every row
  for (const int64_t columns : {0, 1}) {
    LinearOptions options = options_of(p);
    options.tile_columns = columns;
    const Result got = run(p, options, balanced_partition(40, world().size()), world());
    for (const float x : got.logprob) EXPECT_TRUE(std::isnan(x));
  }
}

void expect_traffic(const Problem& p, LinearOptions options, int64_t record) {
  const int64_t n = world().size();
  const VocabPartition vocab = balanced_partition(p.vocab_size, world().size());
  FusedLinear fused(options, vocab, world());
  const test::Matrix x = rows_of(p, fused.first_row(world().rank()), fused.rows()),
                     weight = weight_of(p, vocab, world().rank());
  Result r{Floats(p.targets.size()), Floats(options.entropy ? p.targets.size() : 0),
           test::Matrix(fused.rows(), p.hidden, DType::f32),
           test::Matrix(weight.rows(), p.hidden, DType::f32)};
  HostStream host;
  const int64_t own = p.tokens / n + (world().rank() < p.tokens % n ? 1 : 0);
  const int64_t element = static_cast<int64_t>(size_of(p.type));
  const test::TrafficSince forward(world());
  fused.forward(x.ref(), weight.ref(), p.targets, host, r.logprob, r.entropy);
  const int64_t x_bytes = options.sharded ? (n - 1) * own * p.hidden * element : 0;
  EXPECT_EQ(forward.messages(), n == 1 ? 0 : (options.sharded ? n - 1 : 0) + 1);
  EXPECT_EQ(forward.bytes(), x_bytes + (n - 1) * p.tokens * record);
  const test::TrafficSince backward(world());
  fused.backward(x.ref(), weight.ref(), p.targets,
                 {p.d_logprob, {}, r.d_x.ref().as<float>(), r.d_weight.ref().as<float>()}, host);
  EXPECT_EQ(backward.messages(), n == 1 ? 0 : n - 1 + (options.sharded ? 0 : 1));
  const int64_t share = options.sharded ? 0 : (n - 1) * own * p.hidden * 4;
  EXPECT_EQ(backward.bytes(), n == 1 ? 0 : (p.tokens - own) * p.hidden * 4 + share);
}

TEST(FusedLinear, SendsEachRowOnceForwardAndItsGradientOnceBackward) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool sharded : {true, false})
      for (const int64_t rows : {0, 2}) {
        const Problem p = make_problem(21, 10, 50, type);
        LinearOptions options = options_of(p, sharded);
        options.tile_rows = rows;
        expect_traffic(p, options, 12);
        options.entropy = true;
        expect_traffic(p, options, 16);
      }
}

/// The most that a forward and a backward pass hold beyond what was there before.
int64_t extra_memory(int64_t tokens, int64_t hidden, int64_t vocab_size) {
  const Problem p = make_problem(tokens, hidden, vocab_size, DType::f32);
  LinearOptions options = options_of(p);
  options.tile_rows = 16;
  options.tile_columns = 8;
  const auto measure = [&] {
    reset_memory_peak();
    const int64_t before = memory_use().current_bytes;
    run(p, options, even_partition(vocab_size, vocab_size, world().size()), world());
    return memory_use().peak_bytes - before;
  };
  measure();  // the products' scratch memory stays
  return measure();
}

TEST(FusedLinear, ExtraMemoryDoesNotGrowWithColumnsAndAsHiddenStatesWithTokens) {
  const int64_t n = world().size(), hidden = 8;
  const int64_t few = extra_memory(96 * n, hidden, 16 * n);
  EXPECT_EQ(extra_memory(96 * n, hidden, 160 * n), few);
  // Moments of rows, once of a tile, and records of all ranks; parts of dX; X of all ranks;
  // normalizers.
  const int64_t tokens = 96 * n;
  const int64_t growth = extra_memory(2 * tokens, hidden, 16 * n) - few;
  const int64_t x_bytes = n == 1 ? 0 : tokens * hidden * 4;
  const int64_t records = tokens * (32 + 12 + 12 * (n == 1 ? 1 : n + 1));
  const int64_t parts = n == 1 ? 0 : 3 * 96 * hidden * 4;
  const int64_t lists = 96 * 16;
  EXPECT_LE(growth, x_bytes + 8 * tokens + records + parts + lists);
  EXPECT_GT(growth, x_bytes);
}

std::vector<GridShape> grids() {
  std::vector<GridShape> shapes;
  for (int tp = 1; tp <= world().size(); ++tp)
    if (world().size() % tp == 0) shapes.push_back({1, world().size() / tp, tp});
  return shapes;
}

/// The problem of one context-parallel rank: its slots of the stream.
Problem local_problem(const Problem& all, const Layout& layout, const Ints& bounds,
                      const Ints& tokens, int cp_rank) {
  const Ints index = shard_index(layout, cp_rank);
  Problem p = make_problem(std::ssize(index), all.hidden, all.vocab_size, all.type);
  p.weight = all.weight;
  p.targets = next_token_targets(layout, bounds, tokens, cp_rank);
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t d = 0; d < p.hidden; ++d) {
      const int64_t slot = index[t];
      p.x.at(t, d) = slot < layout.stream_slots ? all.x.row(slot)[d] : quiet_nan;
    }
  return p;
}

TEST(FusedLinear, OverContextParallelRanksPredictsAPackAndSumsTheWeightsGradient) {
  const Ints bounds = {0, 10, 11, 11, 40, 62};
  const int64_t width = 25;
  Problem all = make_problem(62, 12, 37, DType::f32);
  const Ints tokens = all.targets;
  const Layout whole = contiguous({bounds, bounds}, {});
  all.targets = next_token_targets(whole, bounds, tokens, 0);
  const PredictionShape shape{bounds, width};
  // What a loss gives for [segments, width]; the reference has it by slots.
  Floats d(shape.segments() * width);
  for (size_t i = 0; i < d.size(); ++i) d[i] = 0.125F * static_cast<float>(i % 7) - 0.3F;
  std::unique_ptr<Communicator> alone = world().split(world().rank());
  all.d_logprob = gather_predictions_backward(whole, shape, d, *alone, GatherGradient::split);
  const Reference want = make_reference(all, false);
  for (const GridShape& grid_shape : grids()) {
    SCOPED_TRACE(to_string(grid_shape));
    ProcessGrid grid(world(), grid_shape);
    LayoutOptions layout_options;
    layout_options.cp = grid_shape.cp;
    const Layout layout = striped({bounds, bounds}, layout_options);
    const VocabPartition vocab = test::partitions(37, grid_shape.tp).back();
    Problem p = local_problem(all, layout, bounds, tokens, grid.cp_rank());
    p.d_logprob = gather_predictions_backward(layout, shape, d, grid.cp(), GatherGradient::split);
    const LinearOptions options = options_of(p);
    Result got = run(p, options, vocab, grid.tp());
    const Floats predictions = gather_predictions(layout, shape, got.logprob, grid.cp());
    Doubles expected(predictions.size(), 0);
    for (int64_t i = 0; i < shape.segments(); ++i)
      for (int64_t k = 0; k < shape.predictions(i); ++k)
        expected[i * width + k] = want.logprob[bounds[i] + k];
    expect_scores(predictions, expected, linear_logprob_tolerance(12, want.logit_size),
                  logprob_scale);
    const Ints index = shard_index(layout, grid.cp_rank());
    const int64_t first = first_row_of(grid.tp(), p.tokens, true);
    expect_rows(
        got.d_x, want.d_x, want.d_x_size, linear_gradient_tolerance(12, 37, want.logit_size),
        [&](int64_t r) {
          const int64_t slot = index[first + r];
          return slot < layout.stream_slots ? slot : -1;
        },
        "dX");
    test::Matrix summed(got.d_weight.rows(), 12, DType::f32);
    Floats flat;
    for (int64_t r = 0; r < got.d_weight.rows(); ++r)
      for (int64_t k = 0; k < 12; ++k) flat.push_back(static_cast<float>(got.d_weight.at(r, k)));
    HostStream host;
    grid.cp()
        .all_reduce(flat.data(), std::ssize(flat), DType::f32, ReduceOp::sum, host, "dW")
        ->wait();
    for (int64_t r = 0; r < summed.rows(); ++r)
      for (int64_t k = 0; k < 12; ++k) summed.set(r, k, static_cast<double>(flat[12 * r + k]));
    expect_rows(
        summed, want.d_weight, want.d_weight_size,
        linear_gradient_tolerance(12, 62, want.logit_size),
        [&](int64_t r) {
          return r < vocab.valid(grid.tp_rank()) ? vocab.begin(grid.tp_rank()) + r : -1;
        },
        "dW");
  }
}

TEST(FusedLinear, DealsRowsAsEvenlyAsCanBe) {
  const int n = world().size();
  const Problem p = make_problem(2 * n + 1, 3, 10, DType::f32);
  const FusedLinear dealt(options_of(p), balanced_partition(10, n), world());
  EXPECT_EQ(dealt.first_row(0), 0);
  EXPECT_EQ(dealt.first_row(n), 2 * n + 1);
  EXPECT_EQ(dealt.rows(), world().rank() == 0 ? 3 : 2);
  for (int r = 1; r < n; ++r) EXPECT_EQ(dealt.first_row(r), 2 * r + 1);
  const FusedLinear whole(options_of(p, false), balanced_partition(10, n), world());
  EXPECT_EQ(whole.first_row(n - 1), 0);
  EXPECT_EQ(whole.rows(), 2 * n + 1);
}

TEST(FusedLinear, ArgumentErrorsAreTheSameOnAllRanks) {
  const int n = world().size(), me = world().rank();
  const VocabPartition vocab = balanced_partition(10, n);
  const LinearOptions good = options_of(make_problem(4, 3, 10, DType::f32));
  const auto refused = [&](auto change) {
    LinearOptions options = good;
    change(options);
    return agreed_message([&] { FusedLinear(options, vocab, world()); });
  };
  EXPECT_EQ(refused([](LinearOptions&) {}), "no error");
  EXPECT_EQ(refused([](LinearOptions& o) { o.tokens = -1; }), "-1 tokens; the fewest are 0");
  EXPECT_EQ(refused([](LinearOptions& o) { o.hidden = 0; }), "a hidden size of 0; at least 1");
  EXPECT_EQ(refused([](LinearOptions& o) { o.tile_columns = -2; }),
            "tiles of 0 x -2; at least 1 x 1, or 0: by size");
  EXPECT_EQ(refused([](LinearOptions& o) { o.temperature = 0; }),
            "a temperature of 0; it must be positive and finite, and so its inverse in f32");
  EXPECT_EQ(agreed_message([&] { FusedLinear(good, balanced_partition(10, n + 1), world()); }),
            fmt::format("a vocabulary in {} shards for a group of {} ranks; it must be one shard a "
                        "rank",
                        n + 1, n));
  if (n == 1) return;
  const auto differs = [&](const char* what, const char* zero, const char* one) {
    return fmt::format(
        "fused linear layer: {} is {} on rank 0, but {} on rank 1; it must be the "
        "same on all ranks of the group",
        what, zero, one);
  };
  EXPECT_EQ(refused([&](LinearOptions& o) { o.tokens += me == 1 ? 1 : 0; }),
            differs("the number of tokens", "4", "5"));
  EXPECT_EQ(refused([&](LinearOptions& o) { o.hidden += me == 1 ? 1 : 0; }),
            differs("the hidden size", "3", "4"));
  EXPECT_EQ(refused([&](LinearOptions& o) { o.sharded = me != 1; }),
            differs("whether rows are dealt", "1", "0"));
  EXPECT_EQ(refused([&](LinearOptions& o) { o.entropy = me == 1; }),
            differs("whether entropies are wanted", "0", "1"));
  EXPECT_EQ(refused([&](LinearOptions& o) { o.tile_rows = me == 1 ? 8 : 16; }),
            differs("the rows of a tile", "16", "8"));
  EXPECT_EQ(refused([&](LinearOptions& o) { o.temperature = me == 1 ? 1.5 : 1; }),
            differs("the temperature", "1", "1.5"));
}

}  // namespace GYRE_FILE
}  // namespace gyre
