// What the attention kernels on a GPU read, their softmax arithmetic and the sizes of their tiles:
// all that can be checked on the host.

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "attention/kernels/cuda_arguments.hpp"
#include "attention/kernels/cuda_shapes.hpp"
#include "attention/kernels/cuda_tiles.hpp"
#include "core/tolerance.hpp"

namespace gyre {
namespace GYRE_FILE {

Rectangle rectangle(int64_t q, int64_t rows, int64_t k, int64_t keys, Mask mask = {}) {
  return {q, rows, k, keys, mask};
}

/// How often each (query row, key row, rectangle) is met by an inner tile of a range and not
/// hidden.
using Pairs = std::map<std::tuple<int64_t, int64_t, int>, int>;

Pairs pairs_of(const TileTable& table, TileSide side, int outer, int inner) {
  Pairs pairs;
  for (const OuterTile& tile : table.tiles)
    for (int v = tile.range_begin; v < tile.range_end; ++v) {
      const TileRange& tile_range = table.ranges[v];
      const TileRectangle& r = table.rectangles[tile_range.rectangle];
      for (int64_t row = tile.first_row; row < tile.first_row + outer; ++row) {
        const InnerRange range = inner_range(r, row - r.outer_begin);
        for (int begin = tile_range.begin; begin < tile_range.end; begin += inner)
          for (int i = begin; meets(range, begin, inner) && i < begin + inner; ++i) {
            EXPECT_TRUE(contains(range, i) || !covers(range, begin, inner));
            if (!contains(range, i)) continue;
            const int64_t other = r.inner_begin + i;
            const auto [q, k] =
                side == TileSide::queries ? std::pair(row, other) : std::pair(other, row);
            ++pairs[{q, k, tile_range.rectangle}];
          }
      }
    }
  return pairs;
}

Pairs pairs_of(std::span<const Rectangle> rectangles) {
  Pairs pairs;
  for (size_t n = 0; n < rectangles.size(); ++n) {
    const Rectangle& r = rectangles[n];
    for (int64_t i = 0; i < r.q_length; ++i)
      for (int64_t j = std::max<int64_t>(0, r.mask.begin_key(i));
           j < std::min(r.k_length, r.mask.end_key(i)); ++j)
        ++pairs[{r.q_begin + i, r.k_begin + j, static_cast<int>(n)}];
  }
  return pairs;
}

std::vector<Rectangle> arbitrary_rectangles() {
  const auto draw = [](int64_t low, int64_t high) { return *rc::gen::inRange(low, high + 1); };
  std::vector<Rectangle> all;
  for (int64_t n = draw(0, 4); n > 0; --n) {
    Rectangle r = rectangle(draw(0, 90), draw(0, 60), draw(0, 90), draw(0, 60));
    if (draw(0, 3) > 0)
      r.mask = {draw(0, 3) > 0, draw(-70, 130), draw(1, 4), draw(1, 4), draw(0, 1) * draw(1, 70)};
    all.push_back(r);
  }
  return all;
}

TEST(AttentionTilesGpu, EveryVisiblePairIsInOneVisitAndNoOther) {
  EXPECT_TRUE(rc::check([] {
    const std::vector<Rectangle> rectangles = arbitrary_rectangles();
    const int outer = *rc::gen::element(16, 32, 64), inner = *rc::gen::element(8, 16, 32, 64);
    const Pairs want = pairs_of(rectangles);
    for (const TileSide side : {TileSide::queries, TileSide::keys})
      RC_ASSERT(pairs_of(make_tile_table(rectangles, side, outer, inner), side, outer, inner) ==
                want);
  }));
}

TEST(AttentionTilesGpu, RangesAreNotEmptyAndTilesComeLongestFirst) {
  EXPECT_TRUE(rc::check([] {
    std::vector<Rectangle> rectangles = arbitrary_rectangles();
    for (Rectangle& r : rectangles) r.mask.q_stride = r.mask.k_stride = 1;
    constexpr int outer = 16, inner = 8;
    for (const TileSide side : {TileSide::queries, TileSide::keys}) {
      const TileTable table = make_tile_table(rectangles, side, outer, inner);
      int64_t before = std::numeric_limits<int64_t>::max();
      for (const OuterTile& tile : table.tiles) {
        RC_ASSERT(tile.first_row % outer == 0);
        RC_ASSERT(tile.range_begin < tile.range_end);
        int64_t length = 0;
        for (int v = tile.range_begin; v < tile.range_end; ++v) {
          const TileRange& tile_range = table.ranges[v];
          const TileRectangle& r = table.rectangles[tile_range.rectangle];
          RC_ASSERT(tile_range.begin % inner == 0);
          length += tile_range.end - tile_range.begin;
          bool first_tile = false, last_row = false;
          for (int64_t row = tile.first_row; row < tile.first_row + outer; ++row) {
            const InnerRange range = inner_range(r, row - r.outer_begin);
            first_tile = first_tile || meets(range, tile_range.begin, inner);
            last_row = last_row || contains(range, tile_range.end - 1);
          }
          RC_ASSERT(first_tile && last_row);
        }
        RC_ASSERT(length <= before);
        before = length;
      }
    }
  }));
}

TEST(AttentionTilesGpu, TheExampleOfTheHeader) {
  const Mask causal{true};
  const std::vector<Rectangle> documents{rectangle(0, 3, 0, 3, causal),
                                         rectangle(3, 100, 3, 100, causal)};
  const auto text = [](const TileTable& table) {
    std::string all;
    for (const OuterTile& tile : table.tiles) {
      all += fmt::format("{}:", tile.first_row);
      for (int v = tile.range_begin; v < tile.range_end; ++v) {
        const TileRange& tile_range = table.ranges[v];
        all += fmt::format(" {} [{}, {})", tile_range.rectangle, tile_range.begin, tile_range.end);
      }
      all += "; ";
    }
    return all;
  };
  EXPECT_EQ(text(make_tile_table(documents, TileSide::queries, 64, 32)),
            "64: 1 [0, 100); 0: 0 [0, 3) 1 [0, 61); ");
  EXPECT_EQ(text(make_tile_table(documents, TileSide::keys, 64, 32)),
            "0: 0 [0, 3) 1 [0, 100); 64: 1 [32, 100); ");
}

TEST(AttentionTilesGpu, NoRectanglesAreNoTiles) {
  for (const TileSide side : {TileSide::queries, TileSide::keys}) {
    EXPECT_TRUE(make_tile_table({}, side, 64, 64).tiles.empty());
    const std::vector<Rectangle> blind{rectangle(0, 10, 0, 0), rectangle(0, 0, 0, 10),
                                       rectangle(5, 10, 0, 20, {true, -50})};
    EXPECT_TRUE(make_tile_table(blind, side, 64, 64).tiles.empty());
  }
}

TEST(AttentionTilesGpu, PositionsBeyondThirtyTwoBits) {
  const int64_t far = int64_t{1} << 40;
  const Rectangle r = rectangle(0, 4, 0, 4, {true, far, 1, far, 0});
  for (const TileSide side : {TileSide::queries, TileSide::keys})
    EXPECT_EQ(pairs_of(make_tile_table({&r, 1}, side, 16, 8), side, 16, 8),
              pairs_of(std::span(&r, 1)));
}

TEST(AttentionTilesGpu, SoftmaxInBaseTwoIsSoftmax) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(lse_of(partial_of(-infinity)), -infinity);
  EXPECT_EQ(lse_of({}), -infinity);
  EXPECT_EQ(shift_of(-infinity), 0);
  EXPECT_EQ(shift_of(-3), -3);
  EXPECT_EQ(backward_shift(-infinity), infinity);
  for (const float lse : {-80.0F, -1.5F, 0.0F, 0.25F, 40.0F}) {
    const double size = std::max(1.0, std::abs(static_cast<double>(lse)));
    EXPECT_NEAR(lse_of(partial_of(lse)), lse, tolerance_for(DType::f32, 2) * size);
    EXPECT_EQ(backward_shift(lse), partial_of(lse).top);
    // A partial and one more score of 1: log(exp lse + exp 1).
    RowSum row = partial_of(lse);
    const float x = log2_e, top = std::max(row.top, x);
    row = {top, row.sum * std::exp2(row.top - shift_of(top)) + std::exp2(x - shift_of(top))};
    EXPECT_NEAR(lse_of(row), std::log(std::exp(static_cast<double>(lse)) + std::exp(1.0)),
                tolerance_for(DType::f32, 4) * size);
  }
}

constexpr int64_t sm_80 = 164 << 10, sm_86 = 100 << 10, sm_90 = 228 << 10;

void expect_possible(DType type, Sweep sweep, const TileShape& shape) {
  // Floats of a thread that live through a product, of 255 registers.
  const int sums = sweep == Sweep::key_gradients ? 2 : 1;
  const int products = sweep == Sweep::forward ? 1 : 2;
  const int floats = sums * shape.dim / shape.column_parts / 2 + products * shape.inner / 2;
  EXPECT_LE(shape.groups * floats, 192);
  // mma takes 16 inner rows or columns at a time, and f32 products 8.
  EXPECT_EQ(shape.inner % (type == DType::bf16 ? 16 : 8), 0);
  EXPECT_EQ(shape.dim / shape.column_parts % 16, 0);
  // Rows start at multiples of 16 bytes, and 8 of them in different banks.
  const auto row = tile_stride(type, shape.dim) * static_cast<int>(size_of(type));
  EXPECT_EQ(row % 16, 0);
  EXPECT_EQ(row / 16 % 2, 1);
}

TEST(AttentionTilesGpu, ShapesFitEveryGpuFromEightDotZeroOn) {
  constexpr int smallest_block = 99 * 1024;  // compute capability 8.6, 8.9 and 12.0
  for (const DType type : {DType::f32, DType::bf16})
    for (const Sweep sweep : {Sweep::forward, Sweep::query_gradients, Sweep::key_gradients})
      for (const int dim : tile_dims)
        for (const TileForm form : {TileForm::wide, TileForm::narrow, TileForm::tall}) {
          if (!has_form(type, sweep, dim, form)) continue;
          SCOPED_TRACE(testing::Message() << name_of(type) << ' ' << static_cast<int>(sweep) << ' '
                                          << dim << ' ' << static_cast<int>(form));
          const TileShape shape = tile_shape(type, sweep, dim, form);
          EXPECT_EQ(shape.dim, dim);
          EXPECT_EQ(shape.outer(), shape.warps * (form == TileForm::tall ? 32 : 16));
          expect_possible(type, sweep, shape);
          if (form == TileForm::wide)
            EXPECT_LE(shared_bytes(type, sweep, shape), smallest_block);
          else
            EXPECT_GE(blocks_of_sm(type, sweep, shape, sm_90), 2);
        }
}

TEST(AttentionTilesGpu, TilesAreTallOrNarrowWhereTwoBlocksFit) {
  struct Case {
    Sweep sweep;
    int dim;
    TileForm form;
    int64_t on_80, on_90;  ///< blocks
  };
  using enum Sweep;
  using enum TileForm;
  for (const Case& c :
       {Case{forward, 64, wide, 3, 4}, Case{forward, 64, tall, 2, 4}, Case{forward, 96, tall, 3, 4},
        Case{forward, 128, wide, 1, 2}, Case{forward, 128, tall, 2, 3},
        Case{forward, 256, wide, 1, 2}, Case{forward, 256, narrow, 2, 3},
        Case{query_gradients, 64, tall, 2, 3}, Case{query_gradients, 96, tall, 2, 2},
        Case{query_gradients, 128, wide, 2, 3}, Case{query_gradients, 128, tall, 1, 2},
        Case{key_gradients, 64, wide, 2, 4}, Case{key_gradients, 64, tall, 2, 4}}) {
    const TileShape shape = tile_shape(DType::bf16, c.sweep, c.dim, c.form);
    EXPECT_EQ(blocks_of_sm(DType::bf16, c.sweep, shape, sm_80), c.on_80) << c.dim;
    EXPECT_EQ(blocks_of_sm(DType::bf16, c.sweep, shape, sm_90), c.on_90) << c.dim;
  }
  const auto expected = [](DType type, Sweep sweep, int dim, int64_t sm_bytes) {
    if (type == DType::f32 || sm_bytes == sm_86) return wide;
    if (sweep == key_gradients) return dim == 64 ? tall : wide;
    if (sweep == query_gradients && dim == 128) return sm_bytes == sm_80 ? wide : tall;
    if (dim <= 128) return tall;
    return sweep == forward && sm_bytes == sm_80 ? narrow : wide;
  };
  for (const DType type : {DType::f32, DType::bf16})
    for (const Sweep sweep : {forward, query_gradients, key_gradients})
      for (const int dim : tile_dims)
        for (const int64_t sm_bytes : {sm_80, sm_86, sm_90})
          EXPECT_EQ(tile_form_for(type, sweep, dim, sm_bytes), expected(type, sweep, dim, sm_bytes))
              << name_of(type) << ' ' << static_cast<int>(sweep) << ' ' << dim << ' ' << sm_bytes;
}

TEST(AttentionTilesGpu, RowsGoInPiecesOnlyIfAllOfThemAreAligned) {
  EXPECT_TRUE(in_pieces_of_16(4096, 512, 128));
  EXPECT_TRUE(in_pieces_of_16(4096 + 16, 512 + 16, 16));
  for (const int shift : {1, 2, 4, 8}) {
    EXPECT_FALSE(in_pieces_of_16(static_cast<uint64_t>(4096 + shift), 512, 128)) << shift;
    EXPECT_FALSE(in_pieces_of_16(4096, 512 + shift, 128)) << shift;
    EXPECT_FALSE(in_pieces_of_16(4096, 512, 128 + shift)) << shift;
  }
}

TEST(AttentionTilesGpu, HeadsGoToTheSmallestTileThatHoldsThem) {
  EXPECT_EQ(tile_dim_for(1), 64);
  EXPECT_EQ(tile_dim_for(64), 64);
  EXPECT_EQ(tile_dim_for(65), 96);
  EXPECT_EQ(tile_dim_for(128), 128);
  EXPECT_EQ(tile_dim_for(129), 256);
  EXPECT_EQ(tile_dim_for(256), 256);
  EXPECT_EQ(tile_dim_for(257), 0);
}

}  // namespace GYRE_FILE
}  // namespace gyre
