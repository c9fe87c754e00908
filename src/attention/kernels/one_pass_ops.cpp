#include "attention/kernels/one_pass_ops.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/one_pass_ops.cpp"
// The order matters: foreach_target first, -inl headers last.
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include <hwy/cache_control.h>

#include <algorithm>
#include <type_traits>

#include "attention/kernels/merge-inl.hpp"
#include "attention/kernels/one_pass_softmax-inl.hpp"
#include "runtime/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using Wide = hn::CappedTag<float, one_pass_unit>;
using Narrow = hn::CappedTag<float, one_pass_strip>;

/// body(vector of scores): of one_pass_columns(keys).
template <class Body>
HWY_INLINE void with_vector(int64_t keys, Body body) {
  if constexpr (!std::is_same_v<Wide, Narrow>)
    if (keys <= one_pass_strip) return body(Narrow());
  body(Wide());
}

/// A matrix of weights, given by the distances between rows and between columns.
struct Weights {
  const float* data;
  int64_t row_stride, column_stride;
  HWY_INLINE Weights from_row(int64_t row) const {
    return {data + row * row_stride, row_stride, column_stride};
  }
};

/// to [rows][vectors] (+)= Σ_j weights(i, j) · from [j][vectors], j < terms.
/// Not part of the loops around it, which would take registers from it.
template <int rows, int vectors, class D>
HWY_NOINLINE void multiply_block(D d, Weights weights, const float* from, int64_t from_stride,
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

/// Three vectors at a time, and two or one at the end: of four rows, they fill 16 registers.
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

/// The same for up to one_pass_strip rows; `columns` is a multiple of the lanes.
template <class D>
HWY_INLINE void multiply(D d, int64_t rows, Weights weights, const float* from, int64_t from_stride,
                         float* to, int64_t to_stride, int64_t terms, int64_t columns,
                         bool add = false) {
  constexpr int at_once = HWY_TARGET <= HWY_AVX3 ? 8 : 4;  // with 32 registers, or 16
  if (rows == 8 && columns == lanes(d)) {  // enough sums to hide the latency of an FMA
    multiply_block<8, 1>(d, weights, from, from_stride, to, to_stride, terms, add);
    return;
  }
  int64_t i = 0;
  for (; i + at_once <= rows; i += at_once)
    multiply_rows<at_once>(d, weights.from_row(i), from, from_stride, to + i * to_stride, to_stride,
                           terms, columns, add);
  if (at_once == 8 && i + 4 <= rows) {
    multiply_rows<4>(d, weights.from_row(i), from, from_stride, to + i * to_stride, to_stride,
                     terms, columns, add);
    i += 4;
  }
  for (; i < rows; ++i)
    multiply_rows<1>(d, weights.from_row(i), from, from_stride, to + i * to_stride, to_stride,
                     terms, columns, add);
}

void pack_panel(HeadRows<const float> rows, int64_t count, int64_t head_dim, int64_t padded_dim,
                float* panel) {
  constexpr Wide d;
  for (int64_t i = 0; i < count; ++i) {
    const float* row = rows.data + i * rows.stride;
    float* to = panel + i * padded_dim;
    int64_t c = 0;
    for (; c + lanes(d) <= head_dim; c += lanes(d)) hn::Store(hn::LoadU(d, row + c), d, to + c);
    for (; c < head_dim; ++c) to[c] = row[c];
    for (; c < padded_dim; ++c) to[c] = 0;
  }
}

#if HWY_TARGET != HWY_SCALAR
constexpr int64_t block = 4;

/// Four columns of four rows a block of the vector: block b is that of row 4b.
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d, const float* row, int64_t stride) {
  if constexpr (hn::MaxLanes(D()) == block) {
    return hn::LoadU(d, row);
  } else {
    const hn::Half<D> half;
    const float* upper = row + static_cast<int64_t>(hn::MaxLanes(half)) * stride;
    return hn::Combine(d, load_blocks(half, upper, stride), load_blocks(half, row, stride));
  }
}

/// Columns [0, 4) of as many rows as a vector has lanes, to four rows of them.
template <class D>
HWY_INLINE void transpose_block(D f, const float* from, int64_t stride, float* to,
                                int64_t to_stride) {
  const hn::RepartitionToWide<D> wide;
  const auto a = load_blocks(f, from, stride), b = load_blocks(f, from + stride, stride);
  const auto c = load_blocks(f, from + 2 * stride, stride);
  const auto d = load_blocks(f, from + 3 * stride, stride);
  const auto ab_low = hn::BitCast(wide, hn::InterleaveLower(f, a, b));   // a0 b0 a1 b1
  const auto cd_low = hn::BitCast(wide, hn::InterleaveLower(f, c, d));   // c0 d0 c1 d1
  const auto ab_high = hn::BitCast(wide, hn::InterleaveUpper(f, a, b));  // a2 b2 a3 b3
  const auto cd_high = hn::BitCast(wide, hn::InterleaveUpper(f, c, d));
  hn::Store(hn::BitCast(f, hn::InterleaveLower(wide, ab_low, cd_low)), f, to);
  hn::Store(hn::BitCast(f, hn::InterleaveUpper(wide, ab_low, cd_low)), f, to + to_stride);
  hn::Store(hn::BitCast(f, hn::InterleaveLower(wide, ab_high, cd_high)), f, to + 2 * to_stride);
  hn::Store(hn::BitCast(f, hn::InterleaveUpper(wide, ab_high, cd_high)), f, to + 3 * to_stride);
}

/// Of whole blocks, from row `row` on; returns the first row that is left.
template <class D>
HWY_INLINE int64_t transpose_blocks(D d, HeadRows<const float> from, int64_t row, int64_t count,
                                    int64_t head_dim, float* to, int64_t columns) {
  for (; row + lanes(d) <= count; row += lanes(d))
    for (int64_t c = 0; c + block <= head_dim; c += block)
      transpose_block(d, from.data + row * from.stride + c, from.stride, to + c * columns + row,
                      columns);
  return row;
}
#endif

void transpose_rows(HeadRows<const float> from, int64_t count, int64_t head_dim, int64_t columns,
                    float* to) {
  int64_t rows = 0, dims = 0;  // that are done
#if HWY_TARGET != HWY_SCALAR
  rows = transpose_blocks(Narrow(), from, 0, count, head_dim, to, columns);
  rows = transpose_blocks(hn::FixedTag<float, block>(), from, rows, count, head_dim, to, columns);
  dims = head_dim / block * block;
#endif
  for (int64_t c = dims; c < head_dim; ++c)
    for (int64_t i = 0; i < rows; ++i) to[c * columns + i] = from.data[i * from.stride + c];
  if (rows == columns) return;
  for (int64_t c = 0; c < head_dim; ++c) {
    for (int64_t i = rows; i < count; ++i) to[c * columns + i] = from.data[i * from.stride + c];
    for (int64_t i = count; i < columns; ++i) to[c * columns + i] = 0;
  }
}

/// result = w1 · result + w2 · sums; if w1 is 0, it is not read.
HWY_INLINE void blend(const float* sums, int64_t head_dim, float w1, float w2, float* result) {
  constexpr Wide d;
  const auto v1 = hn::Set(d, w1), v2 = hn::Set(d, w2);
  int64_t c = 0;
  if (w1 == 0) {
    for (; c + lanes(d) <= head_dim; c += lanes(d))
      hn::StoreU(hn::Mul(v2, hn::Load(d, sums + c)), d, result + c);
    for (; c < head_dim; ++c) result[c] = w2 * sums[c];
    return;
  }
  for (; c + lanes(d) <= head_dim; c += lanes(d))
    hn::StoreU(hn::MulAdd(v1, hn::LoadU(d, result + c), hn::Mul(v2, hn::Load(d, sums + c))), d,
               result + c);
  for (; c < head_dim; ++c) result[c] = w1 * result[c] + w2 * sums[c];
}

template <class T>
HWY_INLINE void prefetch_next(const HeadRows<T>& rows, const Strip& strip, int64_t head_dim) {
  constexpr int64_t line = 16;
  if (rows.next == nullptr) return;
  for (int64_t i = strip.row; i < strip.row + strip.rows; ++i)
    for (int64_t c = 0; c < head_dim; c += line) hwy::Prefetch(rows.next + i * rows.stride + c);
}

/// Whether the strip sees keys in all of its rows, and nothing was seen before it.
HWY_INLINE bool is_first(const Strip& strip, const float* lse, int64_t lse_stride,
                         const float* sum) {
  bool first = true;
  for (int64_t i = 0; i < strip.rows; ++i)
    first &= lse[(strip.row + i) * lse_stride] == minus_infinity && sum[i] != 0.0F;
  return first;
}

/// Divides the scores of a strip by their sums, so that their products with the values are results,
/// and sets lse.
template <class D>
HWY_INLINE void normalize(D d, const OnePassTile& tile, const Strip& strip, const float* top,
                          const float* sum, float* scores, float* lse, int64_t lse_stride) {
  constexpr Narrow rows;
  HWY_ALIGN float logs[one_pass_strip], factors[one_pass_strip];
  for (int64_t i = 0; i < one_pass_strip; i += lanes(rows)) {
    const auto s = hn::Load(rows, sum + i);
    hn::Store(hn::Div(hn::Set(rows, 1.0F), s), rows, factors + i);
    hn::Store(hn::Add(hn::Load(rows, top + i), hn::Log(rows, s)), rows, logs + i);
  }
  for (int64_t i = 0; i < strip.rows; ++i) {
    float* row = scores + i * tile.columns;
    const auto factor = hn::Set(d, factors[i]);
    for (int64_t c = strip.begin; c < strip.end; c += lanes(d))
      hn::Store(hn::Mul(factor, hn::Load(d, row + c)), d, row + c);
    // Log's own NaN handling does not matter: a NaN sum must stay NaN.
    lse[(strip.row + i) * lse_stride] = logs[i] + (sum[i] - sum[i]);
  }
}

template <class D>
HWY_INLINE void forward_tile(D d, const OnePassTile& tile, HeadRows<const float> q,
                             const float* k_transposed, HeadRows<const float> v,
                             HeadRows<float> out, float* lse, int64_t lse_stride, float* scores,
                             float* sums) {
  HWY_ALIGN float top[one_pass_strip] = {}, sum[one_pass_strip] = {}, merged[one_pass_strip];
  HWY_ALIGN float w1[one_pass_strip], w2[one_pass_strip];
  for (int64_t row = 0; row < tile.rows; row += one_pass_strip) {
    const Strip strip(d, tile, row);
    prefetch_next(q, strip, tile.head_dim);
    prefetch_next(out, strip, tile.head_dim);
    if (strip.begin == strip.end) continue;
    multiply(d, strip.rows, {q.data + row * q.stride, q.stride, 1}, k_transposed + strip.begin,
             tile.columns, scores + strip.begin, tile.columns, tile.head_dim,
             strip.end - strip.begin);
    softmax(d, tile, strip, scores, top, sum);
    const auto add_values = [&](float* to, int64_t stride) HWY_ATTR {
      multiply(Wide(), strip.rows, {scores + strip.first, tile.columns, 1},
               v.data + strip.first * v.stride, v.stride, to, stride, strip.last - strip.first,
               tile.padded_dim);
    };
    // Dividing the scores takes less than a pass over the results where they are fewer.
    if (tile.head_dim == tile.padded_dim && strip.end - strip.begin <= tile.head_dim &&
        is_first(strip, lse, lse_stride, sum)) {
      normalize(d, tile, strip, top, sum, scores, lse, lse_stride);
      add_values(out.data + row * out.stride, out.stride);
      continue;
    }
    add_values(sums, tile.padded_dim);
    for (int64_t i = 0; i < one_pass_strip; ++i)
      merged[i] = i < strip.rows ? lse[(row + i) * lse_stride] : minus_infinity;
    merge_factors(Narrow(), top, sum, one_pass_strip, w1, w2, merged);
    for (int64_t i = 0; i < strip.rows; ++i) {
      if (sum[i] == 0.0F) continue;  // NaN counts as seen
      float& to = lse[(row + i) * lse_stride];
      blend(sums + i * tile.padded_dim, tile.head_dim, to == minus_infinity ? 0 : w1[i], w2[i],
            out.data + (row + i) * out.stride);
      to = merged[i];
    }
  }
}

void one_pass_forward(const OnePassTile& tile, HeadRows<const float> q, const float* k_transposed,
                      HeadRows<const float> v, HeadRows<float> out, float* lse, int64_t lse_stride,
                      float* scores, float* sums) {
  with_vector(tile.keys, [&](auto d) HWY_ATTR {
    forward_tile(d, tile, q, k_transposed, v, out, lse, lse_stride, scores, sums);
  });
}

/// Replaces the products <q, k> of a strip by p, and <dO, v> by scale · ds, in all columns; hidden
/// ones by 0.
template <class D>
HWY_INLINE void differentiate(D d, const OnePassTile& tile, const Strip& strip, const float* lse,
                              const float* delta, float* p, float* d_scores) {
  const bool one_vector = strip.end - strip.begin == lanes(d);
  const bool shown = one_vector || strip.open(tile);  // nothing is left to be hidden
  const auto scale = hn::Set(d, tile.scale);
  const auto columns = columns_from(d, strip.begin);
  for (int64_t i = strip.row; i < strip.row + strip.rows; ++i) {
    float *scores = p + i * tile.columns, *products = d_scores + i * tile.columns;
    const auto reference = hn::Set(d, lse[i]), offset = hn::Set(d, delta[i]);
    const auto seen = within(d, columns, tile.begin[i], tile.end[i]);
    for (int64_t c = strip.begin; c < strip.end; c += lanes(d)) {
      const auto e = exp_f32(d, hn::MulSub(scale, hn::Load(d, scores + c), reference));
      const auto product = hn::Mul(e, hn::MulSub(scale, hn::Load(d, products + c), offset));
      hn::Store(one_vector ? hn::IfThenElseZero(seen, e) : e, d, scores + c);
      hn::Store(one_vector ? hn::IfThenElseZero(seen, product) : product, d, products + c);
    }
    for (float* row : {scores, products}) {
      if (!shown) hide(d, row, Span(d, tile, i), strip.begin, strip.end, 0);
      fill(d, row, 0, strip.begin, 0);
      fill(d, row, strip.end, tile.columns, 0);
    }
  }
}

/// Adds what eight keys at a time get from the rows that see some of them.
HWY_INLINE void add_key_gradients(const OnePassTile& tile, const float* weights,
                                  HeadRows<const float> rows, HeadRows<float> to) {
  int64_t row = 0, end = 0;  // rows whose last key is not before the strip, whose first is
  for (int64_t key = 0; key < tile.keys; key += one_pass_strip) {
    const int64_t count = std::min(one_pass_strip, tile.keys - key);
    while (row < tile.rows && tile.end[row] <= key) ++row;
    while (end < tile.rows && tile.begin[end] < key + count) ++end;
    if (row >= end) continue;
    multiply(Wide(), count, {weights + row * tile.columns + key, 1, tile.columns},
             rows.data + row * rows.stride, rows.stride, to.data + key * to.stride, to.stride,
             end - row, tile.padded_dim, true);
  }
}

template <class D>
HWY_INLINE void backward_tile(D d, const OnePassTile& tile, const OnePassGradientInput& in,
                              HeadRows<float> d_q, HeadRows<float> d_k, HeadRows<float> d_v,
                              float* p, float* d_scores, float* sums) {
  constexpr Wide wide;
  for (int64_t row = 0; row < tile.rows; row += one_pass_strip) {
    const Strip strip(d, tile, row);
    prefetch_next(d_q, strip, tile.head_dim);
    const int64_t at = row * tile.columns + strip.begin, columns = strip.end - strip.begin;
    const auto weights_of = [&](const HeadRows<const float>& rows) {
      return Weights{rows.data + row * rows.stride, rows.stride, 1};
    };
    multiply(d, strip.rows, weights_of(in.q), in.k_transposed + strip.begin, tile.columns, p + at,
             tile.columns, tile.head_dim, columns);
    multiply(d, strip.rows, weights_of(in.d_out), in.v_transposed + strip.begin, tile.columns,
             d_scores + at, tile.columns, tile.head_dim, columns);
    differentiate(d, tile, strip, in.lse, in.delta, p, d_scores);
    if (d_q.data == nullptr || columns == 0) continue;
    const bool direct = tile.head_dim == tile.padded_dim;
    float* to = d_q.data + row * d_q.stride;
    multiply(wide, strip.rows, {d_scores + row * tile.columns + strip.first, tile.columns, 1},
             in.k.data + strip.first * in.k.stride, in.k.stride, direct ? to : sums,
             direct ? d_q.stride : tile.padded_dim, strip.last - strip.first, tile.padded_dim,
             direct);
    for (int64_t i = 0; !direct && i < strip.rows; ++i)
      blend(sums + i * tile.padded_dim, tile.head_dim, 1, 1, to + i * d_q.stride);
  }
  if (d_k.data == nullptr) return;
  add_key_gradients(tile, p, in.d_out, d_v);
  add_key_gradients(tile, d_scores, in.q, d_k);
}

void one_pass_backward(const OnePassTile& tile, const OnePassGradientInput& in, HeadRows<float> d_q,
                       HeadRows<float> d_k, HeadRows<float> d_v, float* p, float* d_scores,
                       float* sums) {
  with_vector(tile.keys, [&](auto d) HWY_ATTR {
    backward_tile(d, tile, in, d_q, d_k, d_v, p, d_scores, sums);
  });
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
HWY_EXPORT(pack_panel);
HWY_EXPORT(transpose_rows);
HWY_EXPORT(one_pass_forward);
HWY_EXPORT(one_pass_backward);

void pack_panel(HeadRows<const float> rows, int64_t count, int64_t head_dim, int64_t padded_dim,
                float* panel) {
  HWY_DYNAMIC_DISPATCH(pack_panel)(rows, count, head_dim, padded_dim, panel);
}
void transpose_rows(HeadRows<const float> from, int64_t count, int64_t head_dim, int64_t columns,
                    float* to) {
  HWY_DYNAMIC_DISPATCH(transpose_rows)(from, count, head_dim, columns, to);
}
void one_pass_forward(const OnePassTile& tile, HeadRows<const float> q, const float* k_transposed,
                      HeadRows<const float> v, HeadRows<float> out, float* lse, int64_t lse_stride,
                      float* scores, float* sums) {
  HWY_DYNAMIC_DISPATCH(one_pass_forward)
  (tile, q, k_transposed, v, out, lse, lse_stride, scores, sums);
}
void one_pass_backward(const OnePassTile& tile, const OnePassGradientInput& in, HeadRows<float> d_q,
                       HeadRows<float> d_k, HeadRows<float> d_v, float* p, float* d_scores,
                       float* sums) {
  HWY_DYNAMIC_DISPATCH(one_pass_backward)(tile, in, d_q, d_k, d_v, p, d_scores, sums);
}
}  // namespace gyre
#endif  // HWY_ONCE
