// Exchanging heads for tokens over all ranks, and the helpers around it.

#include "sharding/ulysses.hpp"

#include <cmath>
#include <functional>
#include <random>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "errors.hpp"
#include "mpi_test.hpp"
#include "sharding/distributed.hpp"
#include "sharding/layouts.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::usage_message;
using test::world;
using Doubles = std::vector<double>;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;
using Shape = std::vector<int64_t>;

/// The message of a usage error.
Doubles random_values(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Doubles values(count);
  for (double& x : values) x = normal(random);
  return values;
}

double dot(const Doubles& a, const Doubles& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

/// x [shape], of which axis `dim` is [begin, begin + length).
Doubles slice(const Doubles& x, const Shape& shape, int dim, int64_t begin, int64_t length) {
  const auto at = shape.begin() + dim;
  const int64_t before = std::accumulate(shape.begin(), at, int64_t{1}, std::multiplies<>());
  const int64_t after = std::accumulate(at + 1, shape.end(), int64_t{1}, std::multiplies<>());
  Doubles result;
  for (int64_t i = 0; i < before; ++i)
    for (int64_t j = begin * after; j < (begin + length) * after; ++j)
      result.push_back(x[i * *at * after + j]);
  return result;
}

TEST(GatherLists, JoinsListsOfAnyLengthInRankOrder) {
  const int n = world().size(), me = world().rank();
  Longs expected;
  for (int r = 0; r < n; ++r)
    for (int i = 0; i < (r + 1) % 3; ++i) expected.push_back(10 * r + i);
  Longs mine;
  for (int i = 0; i < (me + 1) % 3; ++i) mine.push_back(10 * me + i);
  EXPECT_EQ(gather_lists<int64_t>(world(), mine), expected);
}

TEST(GatherLists, SplitIsTheInverseForEqualLists) {
  const int me = world().rank();
  const Ints mine = {me, -me};
  EXPECT_EQ(split_list<int32_t>(world(), gather_lists<int32_t>(world(), mine)), mine);
}

TEST(GatherLists, ALengthThatTheRanksDoNotDivideIsAnErrorWithTheNearestOnes) {
  const int n = world().size();
  if (n == 1) GTEST_SKIP() << "one rank divides every length";
  const auto split = [&](int64_t count) {
    return agreed_message([&] { split_list<int64_t>(world(), Longs(count)); });
  };
  EXPECT_EQ(split(2 * n + 1),
            fmt::format("a list of {} items does not split over {} ranks; the nearest lengths are "
                        "{} and {}",
                        2 * n + 1, n, 2 * n, 3 * n));
  EXPECT_EQ(split(world().rank() == 1 ? 2 * n : n),
            fmt::format("splitting a list: the length of the list is {} on rank 0, but {} on rank "
                        "1; it must be the same on all ranks of the group",
                        n, 2 * n));
}

TEST(SliceAndPad, TenTokensOverFourRanks) {
  const Longs ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const Ints bounds = {0, 10};
  const std::vector<Longs> slices = {{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 0, 0}};
  for (int rank = 0; rank < 4; ++rank) {
    const SlicedInput input = slice_and_pad(ids, 1, ids, 1, bounds, 4, rank);
    EXPECT_EQ(input.ids, slices[static_cast<size_t>(rank)]);
    EXPECT_EQ(input.positions, (Longs{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1}));
    EXPECT_EQ(input.pad, 2);
    Longs axes = ids;
    axes.insert(axes.end(), ids.rbegin(), ids.rend());
    EXPECT_EQ(slice_and_pad(ids, 1, axes, 2, bounds, 4, rank).positions,
              (Longs{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 1}));
    // Padding is a segment without tokens, not a document of two.
    EXPECT_EQ(input.cu_seqlens_padded, (Ints{0, 10, 12}));
    EXPECT_EQ(input.cu_seqlens, (Ints{0, 10, 10}));
    check_bounds(input.bounds());
  }
}

TEST(SliceAndPad, RowsOfABatchAreSlicedAlikeAndAlignedOnesStayAsTheyAre) {
  const Longs ids = {1, 2, 3, 4, 5, 6};
  const Ints bounds = {0, 1, 3};
  const SlicedInput second = slice_and_pad(ids, 2, {}, 1, bounds, 2, 1);
  EXPECT_EQ(second.ids, (Longs{3, 0, 6, 0}));
  EXPECT_TRUE(second.positions.empty());
  EXPECT_EQ(second.cu_seqlens_padded, (Ints{0, 1, 3, 4}));
  const SlicedInput alone = slice_and_pad(ids, 2, Longs{0, 0, 1}, 1, bounds, 1, 0);
  EXPECT_EQ(alone.ids, ids);
  EXPECT_EQ(alone.positions, (Longs{0, 0, 1}));
  EXPECT_EQ(alone.cu_seqlens_padded, bounds);
  EXPECT_EQ(alone.pad, 0);
}

TEST(SliceAndPad, ErrorsNameTheSizes) {
  const Longs ids(6, 1);
  const Ints bounds = {0, 3};
  EXPECT_EQ(usage_message([&] { slice_and_pad(ids, 4, {}, 1, bounds, 2, 0); }),
            "6 ids are not 4 rows of equal length");
  EXPECT_EQ(usage_message([&] { slice_and_pad(ids, 2, Longs(6), 1, bounds, 2, 0); }),
            "6 positions of 1 axes for rows of 3 tokens; one row serves the whole batch");
  EXPECT_EQ(usage_message([&] { slice_and_pad(ids, 1, {}, 1, bounds, 2, 0); }),
            "document boundaries end at 3, but rows have 6 tokens");
  EXPECT_EQ(usage_message([&] { slice_and_pad(ids, 2, {}, 1, bounds, 2, 2); }),
            "rank 2 of 2 ranks");
}

TEST(GatherAxis, JoinsAlongAnyAxisAndDropsPaddingOfAnyAxis) {
  const int n = world().size(), me = world().rank();
  for (int dim = 0; dim < 3; ++dim)
    for (int unpad_dim = 0; unpad_dim < 3; ++unpad_dim) {
      SCOPED_TRACE(fmt::format("axis {}, padding of axis {}", dim, unpad_dim));
      Shape whole_shape = {3, 2, 4};
      const Shape local_shape = whole_shape;
      const int64_t part = whole_shape[dim];
      whole_shape[dim] *= n;
      const Doubles whole = random_values(24 * n, 3);
      const Doubles local = slice(whole, whole_shape, dim, me * part, part);
      const int64_t kept = whole_shape[unpad_dim] - 1;
      EXPECT_EQ(gather_forward_and_unpad<double>(world(), local, {local_shape, dim, 0, -1}), whole);
      const AxisGather gather = {local_shape, dim, 1, unpad_dim};
      const Doubles result = gather_forward_and_unpad<double>(world(), local, gather);
      EXPECT_EQ(result, slice(whole, whole_shape, unpad_dim, 0, kept));
      // No reduction: the gradient of a loss that every rank computes in full, <result, w>.
      const Doubles weights = random_values(std::ssize(result), 4);
      const Doubles gradient = split_backward_and_unpad<double>(world(), weights, gather);
      EXPECT_EQ(gradient.size(), local.size());
      EXPECT_NEAR(all_reduce_value(world(), dot(gradient, local), ReduceOp::sum),
                  dot(weights, result), 1e-9);
    }
}

TEST(GatherAxis, PaddingWithoutAnAxisAndOtherErrors) {
  const int n = world().size();
  const Doubles x(6, 1.0);
  const auto gather = [&](const AxisGather& g) {
    return agreed_message([&] { gather_forward_and_unpad<double>(world(), x, g); });
  };
  EXPECT_EQ(gather({{2, 3}, 1, 2, -1}),
            "dropping 2 entries of padding from axis -1: the tensor has axes 0 to 1");
  EXPECT_EQ(gather({{2, 3}, 1, 3 * n + 1, 1}),
            fmt::format("dropping {} entries of padding from axis 1: it has {}", 3 * n + 1, 3 * n));
  EXPECT_EQ(gather({{2, 3}, 2, 0, -1}), "gathering axis 2: the tensor has axes 0 to 1");
  EXPECT_EQ(gather({{2, 2}, 1, 0, -1}), "gathering an axis: 6 elements, but the local shape has 4");
}

/// x [b, h, n, d] of which this rank has the tokens [rank · t, (rank + 1) · t).
struct Heads {
  Shape whole_shape;
  Doubles whole, local;
  Heads(int64_t b, int64_t h, int64_t t, int64_t d, unsigned seed)
      : whole_shape{b, h, t * world().size(), d},
        whole(random_values(b * h * t * world().size() * d, seed)),
        local(slice(whole, whole_shape, 2, world().rank() * t, t)) {}
};

TEST(Exchange, HeadsForTokensAndBack) {
  const int n = world().size(), me = world().rank();
  const Heads x(2, 3 * n, 5, 2, 1);
  const UlyssesPlan plan = plan_ulysses(world(), {2, 3 * n, 3 * n, 5, 2});
  const Doubles mine = post_exchange<double>(world(), x.local, plan.query).finish();
  EXPECT_EQ(exchanged_shape(plan.query, n), (Shape{2, 3, 5 * n, 2}));
  EXPECT_EQ(mine, slice(x.whole, x.whole_shape, 1, 3 * me, 3));
  EXPECT_EQ(post_exchange<double>(world(), mine, plan.output).finish(), x.local);
}

TEST(Exchange, OutputWithTokensBeforeHeads) {
  const int n = world().size(), me = world().rank();
  const UlyssesPlan plan = plan_ulysses(world(), {2, 3 * n, 3 * n, 5, 2});
  const Shape whole_shape = {2, 5 * n, 3 * n, 2};
  const Doubles whole = random_values(2 * 5 * n * 3 * n * 2, 2);
  const Doubles mine = slice(whole, whole_shape, 2, 3 * me, 3);
  EXPECT_EQ(exchanged_shape(plan.output_token_major, n), (Shape{2, 5, 3 * n, 2}));
  EXPECT_EQ(post_exchange<double>(world(), mine, plan.output_token_major).finish(),
            slice(whole, whole_shape, 1, 5 * me, 5));
}

TEST(Exchange, FewerKeyHeadsThanRanksAreReplicatedAndTheirGradientsSummed) {
  const int n = world().size(), me = world().rank();
  for (int kv_heads = 1; kv_heads <= n; ++kv_heads) {
    if (n % kv_heads != 0) continue;
    SCOPED_TRACE(kv_heads);
    const int replicas = n / kv_heads;
    const Heads x(2, kv_heads, 3, 2, 5);
    const UlyssesPlan plan = plan_ulysses(world(), {2, 2 * n, kv_heads, 3, 2});
    const Doubles mine = post_exchange<double>(world(), x.local, plan.key_value).finish();
    EXPECT_EQ(mine, slice(x.whole, x.whole_shape, 1, me / replicas, 1));
    // Every rank sends back ones: each key head collects one from each of its replicas.
    const Doubles ones(mine.size(), 1.0);
    const AxisExchange backward = backward_of(plan.key_value, n);
    EXPECT_EQ(exchanged_shape(backward, n), plan.key_value.shape);
    EXPECT_EQ(post_exchange<double>(world(), ones, backward).finish(),
              Doubles(x.local.size(), replicas));
  }
}

TEST(Exchange, BackwardIsTheAdjointOfForward) {
  const int n = world().size();
  const UlyssesPlan plan = plan_ulysses(world(), {2, 2 * n, n % 2 == 0 ? n / 2 : n, 3, 2});
  for (const AxisExchange& forward :
       {plan.query, plan.key_value, plan.output, plan.output_token_major}) {
    const int64_t count = std::accumulate(forward.shape.begin(), forward.shape.end(), int64_t{1},
                                          std::multiplies<>());
    const Doubles x = random_values(count, static_cast<unsigned>(7 + world().rank()));
    const Doubles y = post_exchange<double>(world(), x, forward).finish();
    const Doubles w = random_values(std::ssize(y), static_cast<unsigned>(70 + world().rank()));
    const Doubles back = post_exchange<double>(world(), w, backward_of(forward, n)).finish();
    EXPECT_EQ(back.size(), x.size());
    EXPECT_NEAR(all_reduce_value(world(), dot(w, y), ReduceOp::sum),
                all_reduce_value(world(), dot(back, x), ReduceOp::sum), 1e-9);
  }
}

TEST(Exchange, SeveralTensorsAreUnderWayAtOnce) {
  const int n = world().size(), me = world().rank();
  const UlyssesPlan plan = plan_ulysses(world(), {1, 2 * n, n, 4, 3});
  const Heads q(1, 2 * n, 4, 3, 1), k(1, n, 4, 3, 2), v(1, n, 4, 3, 3);
  const Traffic before = world().traffic();
  auto first = post_exchange<double>(world(), q.local, plan.query);
  auto second = post_exchange<double>(world(), k.local, plan.key_value);
  auto third = post_exchange<double>(world(), v.local, plan.key_value);
  EXPECT_EQ(first.finish(), slice(q.whole, q.whole_shape, 1, 2 * me, 2));
  EXPECT_EQ(second.finish(), slice(k.whole, k.whole_shape, 1, me, 1));
  EXPECT_EQ(third.finish(), slice(v.whole, v.whole_shape, 1, me, 1));
  EXPECT_EQ(world().traffic().bytes_sent - before.bytes_sent, (n - 1) * (2 + 1 + 1) * 4 * 3 * 8);
}

TEST(Exchange, HeadsThatDoNotDivideAreAnErrorUpFrontWithTheNearestNumbers) {
  const int n = world().size();
  const auto plan = [&](const UlyssesShape& shape) {
    return agreed_message([&] { plan_ulysses(world(), shape); });
  };
  EXPECT_EQ(plan({1, 0, 1, 4, 2}),
            fmt::format("0 query heads do not divide over {} ranks; the nearest valid number is {}",
                        n, n));
  EXPECT_EQ(plan({1, n, 2 * n, 4, 2}),
            fmt::format("{} key/value heads over {} ranks: the number must divide the {} query "
                        "heads, and divide the number of ranks or be a multiple of it; the nearest "
                        "valid number is {}",
                        2 * n, n, n, n));
  EXPECT_EQ(plan({1, n, n, -1, 2}),
            "1 rows of -1 tokens with heads of 2; at least 1, 0 and 1 are needed");
  if (n == 1) return;
  EXPECT_EQ(plan({1, n + 1, 1, 4, 2}),
            fmt::format("{} query heads do not divide over {} ranks; the nearest valid numbers are "
                        "{} and {}",
                        n + 1, n, n, 2 * n));
  EXPECT_EQ(plan({1, n, n, world().rank() == 1 ? 5 : 4, 2}),
            "exchanging heads for tokens: the number of tokens a rank is 4 on rank 0, but 5 on "
            "rank 1; it must be the same on all ranks of the group");
  if (n != 4) return;
  EXPECT_EQ(plan({1, 24, 3, 4, 2}),
            "3 key/value heads over 4 ranks: the number must divide the 24 query heads, and divide "
            "the number of ranks or be a multiple of it; the nearest valid numbers are 2 and 4");
}

TEST(SequenceOrder, ChunksOfOneSegmentOnFourRanks) {
  const Ints bounds = {0, 8};
  const Layout layout = dual_chunk_swap({bounds, bounds}, 4);
  const Doubles sequence = {0, 1, 2, 3, 4, 5, 6, 7};
  // Which slot of the stream comes at each place of the ranks' joined shards, and the inverse.
  EXPECT_EQ(to_rank_order<double>(layout, sequence, 1, 1), (Doubles{0, 7, 1, 6, 2, 5, 3, 4}));
  EXPECT_EQ(to_sequence_order<double>(layout, sequence, 1, 1), (Doubles{0, 2, 4, 6, 7, 5, 3, 1}));
}

TEST(SequenceOrder, IsPerSegmentPerPlaneAndInvertible) {
  const Ints bounds = {0, 4, 12};
  const Layout layout = dual_chunk_swap({bounds, bounds}, 2);
  Doubles planes, in_rank_order;
  for (const double plane : {0.0, 1000.0})
    for (int slot = 0; slot < 12; ++slot)
      for (const double e : {0.0, 0.5}) planes.push_back(plane + slot + e);
  for (const double plane : {0.0, 1000.0})
    for (const int slot : {0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9})
      for (const double e : {0.0, 0.5}) in_rank_order.push_back(plane + slot + e);
  EXPECT_EQ(to_rank_order<double>(layout, planes, 2, 2), in_rank_order);
  EXPECT_EQ(to_sequence_order<double>(layout, in_rank_order, 2, 2), planes);
  EXPECT_EQ(usage_message([&] { to_rank_order<double>(layout, planes, 1, 2); }),
            "reordering a sequence: 48 elements, but 1 planes x 12 slots x 2");
}

/// Causal attention of one head inside segments, on a stream in its own order: [n, d].
Doubles attend(const Doubles& q, const Doubles& k, const Doubles& v, const Ints& bounds,
               int64_t d) {
  Doubles out(q.size(), 0.0);
  const auto at = [d](const Doubles& x, int64_t t) { return x.begin() + t * d; };
  const std::vector<int32_t> segment = segment_ids(bounds);
  for (int64_t i = 0; i < bounds.back(); ++i) {
    double sum = 0;
    for (int64_t j = bounds[segment[i]]; j <= i; ++j) {
      const double weight = std::exp(std::inner_product(at(q, i), at(q, i) + d, at(k, j), 0.0));
      sum += weight;
      for (int64_t e = 0; e < d; ++e) out[i * d + e] += weight * v[j * d + e];
    }
    for (int64_t e = 0; e < d; ++e) out[i * d + e] /= sum;
  }
  return out;
}

/// One head of x [heads, n, d].
Doubles head(const Doubles& x, int64_t h, int64_t size) {
  return {x.begin() + h * size, x.begin() + (h + 1) * size};
}

/// The rank's slots of x [heads, n, d].
Doubles shard_heads(const Layout& layout, const Doubles& x, int64_t heads, int64_t d) {
  Doubles shards;
  const int64_t size = layout.padded_slots * d;
  for (int64_t h = 0; h < heads; ++h) {
    Doubles local(size / layout.cp());
    shard_rows<double>(layout, world().rank(), head(x, h, size), local, d);
    shards.insert(shards.end(), local.begin(), local.end());
  }
  return shards;
}

TEST(SequenceOrder, AttentionOfExchangedDualChunkSwapShardsEqualsThatOfTheWholeStream) {
  const int n = world().size();
  const Ints bounds = {0, 4 * n, 4 * n, 6 * n, 12 * n};
  const Layout layout = dual_chunk_swap({bounds, bounds}, n);
  const int64_t heads = 2 * n, d = 3, size = 12 * n * d;
  for (const int64_t kv_heads : {int64_t{1}, int64_t{n}, heads}) {
    SCOPED_TRACE(kv_heads);
    const int64_t queries_a_key = heads / kv_heads;
    const Doubles q = random_values(heads * size, 1), k = random_values(kv_heads * size, 2),
                  v = random_values(kv_heads * size, 3);
    Doubles expected;
    for (int64_t h = 0; h < heads; ++h) {
      const Doubles out = attend(head(q, h, size), head(k, h / queries_a_key, size),
                                 head(v, h / queries_a_key, size), bounds, d);
      expected.insert(expected.end(), out.begin(), out.end());
    }
    const UlyssesPlan plan = plan_ulysses(world(), {1, heads, kv_heads, 12, d});
    const auto exchange = [&](const Doubles& x, int64_t h, const AxisExchange& e) {
      const Doubles mine = post_exchange<double>(world(), shard_heads(layout, x, h, d), e).finish();
      return to_sequence_order<double>(layout, mine, std::ssize(mine) / size, d);
    };
    const Doubles my_q = exchange(q, heads, plan.query),
                  my_k = exchange(k, kv_heads, plan.key_value),
                  my_v = exchange(v, kv_heads, plan.key_value);
    const int64_t my_kv_heads = std::ssize(my_k) / size;
    Doubles mine;
    for (int64_t h = 0; h < 2; ++h) {
      const int64_t key = h * my_kv_heads / 2;
      const Doubles out =
          attend(head(my_q, h, size), head(my_k, key, size), head(my_v, key, size), bounds, d);
      mine.insert(mine.end(), out.begin(), out.end());
    }
    const Doubles out =
        post_exchange<double>(world(), to_rank_order<double>(layout, mine, 2, d), plan.output)
            .finish();
    EXPECT_EQ(out, shard_heads(layout, expected, heads, d));
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
