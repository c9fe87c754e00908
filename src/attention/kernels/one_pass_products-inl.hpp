// Matrix products of one-pass attention, compiled once per Highway target. Include after
// hwy/highway.h, inside a file that Highway includes once per target (hence no #pragma once).

#if defined(GYRE_ATTENTION_KERNELS_ONE_PASS_PRODUCTS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_ATTENTION_KERNELS_ONE_PASS_PRODUCTS_INL_HPP_
#undef GYRE_ATTENTION_KERNELS_ONE_PASS_PRODUCTS_INL_HPP_
#else
#define GYRE_ATTENTION_KERNELS_ONE_PASS_PRODUCTS_INL_HPP_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "attention/kernels/one_pass_ops.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using Wide = hn::CappedTag<float, one_pass_unit>;
using Narrow = hn::CappedTag<float, one_pass_strip>;

template <class D>
HWY_INLINE int64_t lanes(D d) {
  return hn::Lanes(d);
}

/// A matrix of weights, given by its row and column strides.
struct Weights {
  const float* data;
  int64_t row_stride, column_stride;
  HWY_INLINE Weights from(int64_t row, int64_t column) const {
    return {data + row * row_stride + column * column_stride, row_stride, column_stride};
  }
};

/// to [rows][vectors] (+)= Σ_j weights(i, j) · from [j][vectors], j < terms.
template <int rows, int vectors, class D>
HWY_INLINE void multiply_few(D d, Weights weights, const float* from, int64_t from_stride,
                             float* to, int64_t to_stride, int64_t terms, bool add) {
  using V = hn::Vec<D>;
  V sums[rows][vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
      sums[i][v] = add ? hn::LoadU(d, to + i * to_stride + v * lanes(d)) : hn::Zero(d);
  const float* weight = weights.data;
  for (int64_t j = 0; j < terms; ++j, from += from_stride, weight += weights.column_stride) {
    V x[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) x[v] = hn::LoadU(d, from + v * lanes(d));
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const V w = hn::Set(d, weight[i * weights.row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[i][v] = hn::MulAdd(w, x[v], sums[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) hn::StoreU(sums[i][v], d, to + i * to_stride + v * lanes(d));
}

/// multiply_few, not inlined: the surrounding loops would take registers from it.
template <int rows, int vectors, class D>
HWY_NOINLINE void multiply_block(D d, Weights weights, const float* from, int64_t from_stride,
                                 float* to, int64_t to_stride, int64_t terms, bool add) {
  multiply_few<rows, vectors>(d, weights, from, from_stride, to, to_stride, terms, add);
}

/// multiply_few for three vectors at a time, two or one at the end: 4 rows then fill 16 registers.
template <int rows, class D>
HWY_INLINE void multiply_rows(D d, Weights weights, const float* from, int64_t from_stride,
                              float* to, int64_t to_stride, int64_t terms, int64_t columns,
                              bool add) {
  const int64_t n = lanes(d);
  int64_t c = 0;
  for (; c + 3 * n <= columns && c + 4 * n != columns; c += 3 * n)
    multiply_block<rows, 3>(d, weights, from + c, from_stride, to + c, to_stride, terms, add);
  for (; c + 2 * n <= columns; c += 2 * n)
    multiply_block<rows, 2>(d, weights, from + c, from_stride, to + c, to_stride, terms, add);
  if (c < columns)
    multiply_block<rows, 1>(d, weights, from + c, from_stride, to + c, to_stride, terms, add);
}

inline constexpr int rows_at_once = HWY_TARGET <= HWY_AVX3 ? 8 : 4;  ///< for 32 or 16 registers

/// multiply_few for up to one_pass_strip rows; `columns` is a multiple of the lanes.
template <class D>
HWY_INLINE void multiply(D d, int64_t rows, Weights weights, const float* from, int64_t from_stride,
                         float* to, int64_t to_stride, int64_t terms, int64_t columns,
                         bool add = false) {
  if (rows == 8 && columns == lanes(d)) {  // enough sums to hide the FMA latency
    multiply_block<8, 1>(d, weights, from, from_stride, to, to_stride, terms, add);
    return;
  }
  int64_t i = 0;
  for (; i + rows_at_once <= rows; i += rows_at_once)
    multiply_rows<rows_at_once>(d, weights.from(i, 0), from, from_stride, to + i * to_stride,
                                to_stride, terms, columns, add);
  if (rows_at_once == 8 && i + 4 <= rows) {
    multiply_rows<4>(d, weights.from(i, 0), from, from_stride, to + i * to_stride, to_stride, terms,
                     columns, add);
    i += 4;
  }
  for (; i < rows; ++i)
    multiply_rows<1>(d, weights.from(i, 0), from, from_stride, to + i * to_stride, to_stride, terms,
                     columns, add);
}

#if HWY_TARGET != HWY_SCALAR
/// Each block of four lanes gets the sums of that block in a, in b, in c and in e.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V sums_of_blocks(D d, V a, V b, V c, V e) {
  const hn::RepartitionToWide<D> wide;
  const auto add = [&](V x, V y) HWY_ATTR {  // two lanes of x, two of y
    return hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, x, y), hn::InterleaveUpper(d, x, y)));
  };
  const auto ab = add(a, b), ce = add(c, e);
  return hn::Add(hn::BitCast(d, hn::InterleaveLower(wide, ab, ce)),
                 hn::BitCast(d, hn::InterleaveUpper(wide, ab, ce)));
}
#endif

/// Form of a product. `many`: not inlined, for many terms. `few`: inlined, for the few terms of a
/// tile whose scores are dot products.
enum class Terms { many, few };
template <Terms form>
inline constexpr int64_t rows_of_block = form == Terms::few ? 4 : rows_at_once;

/// to [rows] (+)= Σ_j weights(i, j) · from [j], for one block of rows of `padded` elements.
template <Terms form>
HWY_INLINE void multiply_rows_of_block(int64_t rows, Weights weights, HeadRows<const float> from,
                                       HeadRows<float> to, int64_t terms, int64_t padded,
                                       bool add) {
  constexpr Wide d;
  if (form == Terms::many || rows < rows_of_block<form>)
    return multiply(d, rows, weights, from.data, from.stride, to.data, to.stride, terms, padded,
                    add);
  int64_t c = 0;
  for (; c + 2 * lanes(d) <= padded; c += 2 * lanes(d))
    multiply_few<4, 2>(d, weights, from.data + c, from.stride, to.data + c, to.stride, terms, add);
  if (c < padded)
    multiply_few<4, 1>(d, weights, from.data + c, from.stride, to.data + c, to.stride, terms, add);
}

/// to [i] (+)= Σ weights(i, key) · keys [key] over the keys that row `row` + i of the tile sees.
template <Terms form>
HWY_INLINE void multiply_seen_keys(const OnePassTile& tile, int64_t row, int64_t count,
                                   Weights weights, HeadRows<const float> keys, HeadRows<float> to,
                                   const HeadWidth& width, bool add) {
  for (int64_t i = 0; i < count; i += rows_of_block<form>) {
    const int64_t rows = std::min(rows_of_block<form>, count - i), first = tile.begin[row + i];
    const int64_t last = std::max<int64_t>(first, tile.end[row + i + rows - 1]);
    multiply_rows_of_block<form>(rows, weights.from(i, first), keys.from(first), to.from(i),
                                 last - first, width.padded, add);
  }
}

/// to [key] += Σ weights(key, row) · rows [row] over the rows of the tile that see a key.
template <Terms form>
HWY_INLINE void multiply_seeing_rows(const OnePassTile& tile, Weights weights,
                                     HeadRows<const float> rows, HeadRows<float> to,
                                     const HeadWidth& width) {
  int64_t row = 0, end = 0;  // range of rows that see a key of the block
  for (int64_t key = 0; key < tile.keys; key += rows_of_block<form>) {
    const int64_t keys = std::min(rows_of_block<form>, tile.keys - key);
    while (row < tile.rows && tile.end[row] <= key) ++row;
    while (end < tile.rows && tile.begin[end] < key + keys) ++end;
    if (row < end)
      multiply_rows_of_block<form>(keys, weights.from(key, row), rows.from(row), to.from(key),
                                   end - row, width.padded, true);
  }
}

inline constexpr int64_t dot_rows = 4, dot_keys = 2;  ///< products computed at a time

/// to [keys][one_pass_strip] = <row, key> for a strip of rows, as dot products without a transpose.
/// Skips products that no row sees, in blocks. The rows of `to` come in pairs; columns of rows that
/// the strip does not have are arbitrary.
template <class D>
HWY_INLINE void dot_products(D d, const OnePassTile& strip, HeadRows<const float> rows,
                             HeadRows<const float> keys, int64_t dim, float* to) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t j = 0; j < strip.keys; ++j)
    for (int64_t i = 0; i < strip.rows; ++i) {
      const float *row = rows.data + i * rows.stride, *key = keys.data + j * keys.stride;
      to[j * one_pass_strip + i] = std::inner_product(row, row + dim, key, 0.0F);
    }
  (void)d;
#else
  using V = hn::Vec<D>;
  const float* row[one_pass_strip];
  for (int64_t i = 0; i < one_pass_strip; ++i)
    row[i] = rows.data + std::min(i, strip.rows - 1) * rows.stride;
  for (int64_t j = 0; j < strip.keys; j += dot_keys) {
    const float* k0 = keys.data + j * keys.stride;
    const float* k1 = keys.data + std::min(j + 1, strip.keys - 1) * keys.stride;
    V sums[dot_keys][one_pass_strip / dot_rows];
    for (int64_t b = 0; b < one_pass_strip / dot_rows; ++b) {
      sums[0][b] = sums[1][b] = hn::Zero(d);
      const int64_t first = b * dot_rows, last = std::min(first + dot_rows, strip.rows) - 1;
      if (first > last || strip.begin[first] >= j + dot_keys || strip.end[last] <= j) continue;
      V s0[dot_rows], s1[dot_rows];
      for (int64_t i = 0; i < dot_rows; ++i) s0[i] = s1[i] = hn::Zero(d);
#pragma GCC unroll 2
      for (int64_t c = 0; c < dim; c += lanes(d)) {
        const V x0 = hn::LoadU(d, k0 + c), x1 = hn::LoadU(d, k1 + c);
#pragma GCC unroll 4
        for (int64_t i = 0; i < dot_rows; ++i) {
          const V x = hn::LoadU(d, row[first + i] + c);
          s0[i] = hn::MulAdd(x, x0, s0[i]);
          s1[i] = hn::MulAdd(x, x1, s1[i]);
        }
      }
      sums[0][b] = sums_of_blocks(d, s0[0], s0[1], s0[2], s0[3]);
      sums[1][b] = sums_of_blocks(d, s1[0], s1[1], s1[2], s1[3]);
    }
    for (int64_t k = 0; k < dot_keys; ++k, to += one_pass_strip) {
      const V low = sums[k][0], high = sums[k][1];
      if constexpr (hn::MaxLanes(D()) == one_pass_strip) {
        hn::Store(hn::Add(hn::ConcatLowerLower(d, high, low), hn::ConcatUpperUpper(d, high, low)),
                  d, to);
      } else {
        hn::Store(low, d, to);
        hn::Store(high, d, to + dot_rows);
      }
    }
  }
#endif
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
