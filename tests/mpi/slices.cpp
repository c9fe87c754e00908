// Slices of sequences over all ranks, and their gathers.

#include "sharding/slices.hpp"

#include <random>

#include "comm/agree.hpp"
#include "errors.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::usage_message;
using test::world;
using Doubles = std::vector<double>;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;
using Shape = std::vector<int64_t>;

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

}  // namespace GYRE_FILE
}  // namespace gyre
