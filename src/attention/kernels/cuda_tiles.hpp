#pragma once
// Tiles and ranges of the CUDA attention kernels, and the arithmetic of masks and softmax that they
// share with host tests.
//
//     side        queries: sums belong to queries (out, dQ), inner rows are keys;
//                 keys: sums belong to keys (dK, dV), inner rows are queries
//     tile        n outer rows (rows with sums) [n t, n t + n), whatever they hold: a thread block
//     range       the inner rows of one rectangle that the rows of the tile see
//     inner tile  some rows of a range, counted from the corner of the rectangle
//
//     for every tile, longest first                                   one thread block each
//       for every range, in the order of rectangles
//         for every inner tile: hide rows outside inner_range(); add
//
// Inner tiles start at multiples of their size from the rectangle's corner, and a hidden inner tile
// leaves a row unchanged. The bits of a row therefore depend only on its rectangles, not on where
// tiles of outer rows begin.
//
// Example: causal documents of 3 and 100 tokens at rows 0 and 3, tiles of 64 rows, inner tiles of
// 32. Tile 0 (rows 0-63) sees rows 0-2 of document 0 and rows 0-60 of document 1; tile 1 (rows
// 64-102) sees rows 0-99 of document 1. Tiles of keys: tile 0 sees queries 0-2 of document 0
// and 0-99 of document 1; tile 1 (keys 61-99 of document 1) sees queries 32-99 of it, since 61 is
// rounded down to a multiple of the inner tile.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "attention/rectangle.hpp"
#include "core/error.hpp"
#include "core/host_device.hpp"
#include "core/index.hpp"

namespace gyre {

enum class TileSide { queries, keys };

/// A rectangle seen from one side, in rows of arrays; the mask is that of Mask.
struct TileRectangle {
  int64_t outer_begin = 0, outer_length = 0;
  int64_t inner_begin = 0, inner_length = 0;
  int64_t offset = 0, q_stride = 1, k_stride = 1, window = 0;
  bool causal = false;
  bool outer_is_keys = false;
};

/// Inner rows [begin, end) of a rectangle, counted from its corner.
struct InnerRange {
  int begin = 0, end = 0;
};

/// Begin and end of the inner rows that row `outer` of the rectangle (from its corner) sees,
/// clipped to the rectangle; begin >= end if none. Both are nondecreasing in `outer`. Query i and
/// key j see each other when offset + i q_stride - j k_stride is >= 0 if `causal`, and < window
/// unless window is 0.
GYRE_HOST_DEVICE inline InnerRange inner_limits(const TileRectangle& r, int64_t outer) {
  int64_t begin = 0, end = r.inner_length;
  if (r.outer_is_keys) {
    const int64_t position = outer * r.k_stride - r.offset;
    if (r.causal) begin = ceil_div(position, r.q_stride);
    if (r.window > 0) end = floor_div(position + r.window - 1, r.q_stride) + 1;
  } else {
    const int64_t position = r.offset + outer * r.q_stride;
    if (r.causal) end = floor_div(position, r.k_stride) + 1;
    if (r.window > 0) begin = floor_div(position - r.window, r.k_stride) + 1;
  }
  const auto clip = [&r](int64_t row) {
    return static_cast<int>(row < 0 ? 0 : row > r.inner_length ? r.inner_length : row);
  };
  return {clip(begin), clip(end)};
}

/// Inner rows that row `outer` sees; (0, 0) if none, or if it is outside the rectangle.
GYRE_HOST_DEVICE inline InnerRange inner_range(const TileRectangle& r, int64_t outer) {
  if (outer < 0 || outer >= r.outer_length) return {};
  const InnerRange seen = inner_limits(r, outer);
  if (seen.begin >= seen.end) return {};
  return seen;
}

/// Whether any (meets), or all (covers), inner rows [begin, begin + count) are in the range.
GYRE_HOST_DEVICE inline bool meets(InnerRange range, int begin, int count) {
  return range.begin < begin + count && range.end > begin && range.begin < range.end;
}
GYRE_HOST_DEVICE inline bool covers(InnerRange range, int begin, int count) {
  return range.begin <= begin && range.end >= begin + count;
}
GYRE_HOST_DEVICE inline bool contains(InnerRange range, int row) {
  return range.begin <= row && row < range.end;
}

// Softmax in base 2: weights are 2^(scale log2(e) · score - top), scale > 0, so that an exponential
// is two instructions. A partial result (O, LSE) has top = LSE log2(e) and sum = 1.

inline constexpr float log2_e = 1.44269504088896340736F, ln_2 = 0.69314718055994530942F;

/// A row's running maximum of scale log2(e) · score, and the sum of its weights relative to it.
struct RowSum {
  float top = -std::numeric_limits<float>::infinity();
  float sum = 0;
};
/// a · b, rounded before any addition (no FMA): an unchanged row must keep its bits.
GYRE_HOST_DEVICE inline float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
GYRE_HOST_DEVICE inline RowSum partial_of(float lse) {
  const bool empty = lse == -std::numeric_limits<float>::infinity();
  return {rounded_product(lse, log2_e), empty ? 0.0F : 1.0F};
}
GYRE_HOST_DEVICE inline float lse_of(RowSum row) {
  return fmaf(row.top, ln_2, std::log(row.sum));
}
/// Reference of the exponential: `top`, but 0 for a row that has seen nothing, where -inf - -inf
/// would be NaN.
GYRE_HOST_DEVICE inline float shift_of(float top) {
  return top == -std::numeric_limits<float>::infinity() ? 0.0F : top;
}
/// Base-2 log-sum-exp of a row in the backward pass; infinity, hence weights of 0, for a row that
/// saw nothing.
GYRE_HOST_DEVICE inline float backward_shift(float lse) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  return lse == -infinity ? infinity : rounded_product(lse, log2_e);
}

/// Inner rows [begin, end) of a rectangle; begin is a multiple of the size of an inner tile.
struct TileRange {
  int rectangle = 0, begin = 0, end = 0;
};
/// Outer rows from first_row on, with ranges [range_begin, range_end) of the table.
struct OuterTile {
  int64_t first_row = 0;
  int range_begin = 0, range_end = 0;
};
struct TileTable {
  std::vector<TileRectangle> rectangles;
  std::vector<TileRange> ranges;
  std::vector<OuterTile> tiles;
};

inline TileRectangle seen_from(const Rectangle& r, TileSide side) {
  TileRectangle t{.outer_begin = r.q_begin,
                  .outer_length = r.q_length,
                  .inner_begin = r.k_begin,
                  .inner_length = r.k_length,
                  .offset = r.mask.offset,
                  .q_stride = r.mask.q_stride,
                  .k_stride = r.mask.k_stride,
                  .window = r.mask.window,
                  .causal = r.mask.causal,
                  .outer_is_keys = side == TileSide::keys};
  if (side == TileSide::keys) {
    std::swap(t.outer_begin, t.inner_begin);
    std::swap(t.outer_length, t.inner_length);
  }
  return t;
}

/// Tiles of `outer_rows` rows that see anything. The longest come first, so that the last blocks to
/// run are short; ranges of a tile are in the order of `rectangles`. O(ranges log ranges).
/// Rectangles are shorter than 2^31 rows.
inline TileTable make_tile_table(std::span<const Rectangle> rectangles, TileSide side,
                                 int outer_rows, int inner_rows) {
  TileTable table;
  std::vector<std::pair<int64_t, TileRange>> found;  // tile, range
  for (const Rectangle& rectangle : rectangles) {
    const TileRectangle r = seen_from(rectangle, side);
    GYRE_CHECK(std::max(r.outer_length, r.inner_length) < std::numeric_limits<int>::max(),
               "a rectangle of {} x {} rows", r.outer_length, r.inner_length);
    const auto index = static_cast<int>(table.rectangles.size());
    table.rectangles.push_back(r);
    const int64_t outer_end = r.outer_begin + r.outer_length;
    for (int64_t row = r.outer_begin; row < outer_end;) {
      const int64_t tile = row / outer_rows, next = std::min(outer_end, (tile + 1) * outer_rows);
      const int begin = inner_limits(r, row - r.outer_begin).begin;
      const int end = inner_limits(r, next - 1 - r.outer_begin).end;
      if (begin < end) found.push_back({tile, {index, begin / inner_rows * inner_rows, end}});
      row = next;
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < found.size(); ++i) {
    const auto& [tile, range] = found[i];
    const auto at = static_cast<int>(i);
    if (i == 0 || found[i - 1].first != tile) {
      table.tiles.push_back({tile * outer_rows, at, at});
      lengths.push_back(0);
    }
    table.ranges.push_back(range);
    table.tiles.back().range_end = at + 1;
    lengths.back() += range.end - range.begin;
  }
  std::vector<size_t> order(table.tiles.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
  std::vector<OuterTile> sorted;
  for (const size_t i : order) sorted.push_back(table.tiles[i]);
  table.tiles = std::move(sorted);
  return table;
}

}  // namespace gyre
