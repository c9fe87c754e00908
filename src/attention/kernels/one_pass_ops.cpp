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
#include "attention/kernels/one_pass_products-inl.hpp"
#include "attention/kernels/one_pass_softmax-inl.hpp"
#include "runtime/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

/// Calls body(d) with the vector type for the scores of `keys` keys.
template <class Body>
HWY_INLINE void with_vector(int64_t keys, Body body) {
  if constexpr (!std::is_same_v<Wide, Narrow>)
    if (keys <= one_pass_strip) return body(Narrow());
  body(Wide());
}

void pack_panel(HeadRows<const float> rows, int64_t count, const HeadWidth& width, float* panel) {
  constexpr Wide d;
  for (int64_t i = 0; i < count; ++i) {
    const float* row = rows.data + i * rows.stride;
    float* to = panel + i * width.padded;
    int64_t c = 0;
    for (; c + lanes(d) <= width.dim; c += lanes(d)) hn::Store(hn::LoadU(d, row + c), d, to + c);
    for (; c < width.dim; ++c) to[c] = row[c];
    for (; c < width.padded; ++c) to[c] = 0;
  }
}

#if HWY_TARGET != HWY_SCALAR
constexpr int64_t block = 4;

/// Loads four columns of one row into each block of four lanes: block b gets row 4b.
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d, const float* row, int64_t stride) {
  if constexpr (hn::MaxLanes(D()) == block) {
    return hn::LoadU(d, row);
  } else {
    const hn::Half<D> half;
    const float* upper = row + hn::MaxLanes(half) * stride;
    return hn::Combine(d, load_blocks(half, upper, stride), load_blocks(half, row, stride));
  }
}

/// Transposes columns [0, 4) of as many rows as a vector has lanes into four rows.
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

/// Transposes whole blocks from row `row` on; returns the first remaining row.
template <class D>
HWY_INLINE int64_t transpose_blocks(D d, HeadRows<const float> from, int64_t row, int64_t count,
                                    int64_t dim, float* to, int64_t columns) {
  for (; row + lanes(d) <= count; row += lanes(d))
    for (int64_t c = 0; c + block <= dim; c += block)
      transpose_block(d, from.data + row * from.stride + c, from.stride, to + c * columns + row,
                      columns);
  return row;
}
#endif

void transpose_rows(HeadRows<const float> from, int64_t count, int64_t dim, int64_t columns,
                    float* to) {
  int64_t rows = 0, dims = 0;  // already transposed
#if HWY_TARGET != HWY_SCALAR
  rows = transpose_blocks(Narrow(), from, 0, count, dim, to, columns);
  rows = transpose_blocks(hn::FixedTag<float, block>(), from, rows, count, dim, to, columns);
  dims = dim / block * block;
#endif
  for (int64_t c = dims; c < dim; ++c)
    for (int64_t i = 0; i < rows; ++i) to[c * columns + i] = from.data[i * from.stride + c];
  if (rows == columns) return;
  for (int64_t c = 0; c < dim; ++c) {
    for (int64_t i = rows; i < count; ++i) to[c * columns + i] = from.data[i * from.stride + c];
    for (int64_t i = count; i < columns; ++i) to[c * columns + i] = 0;
  }
}

/// result = w1 · result + w2 · sums; does not read `result` if w1 is 0.
HWY_INLINE void blend(const float* sums, int64_t dim, float w1, float w2, float* result) {
  constexpr Wide d;
  const auto v1 = hn::Set(d, w1), v2 = hn::Set(d, w2);
  int64_t c = 0;
  if (w1 == 0) {
    for (; c + lanes(d) <= dim; c += lanes(d))
      hn::StoreU(hn::Mul(v2, hn::Load(d, sums + c)), d, result + c);
    for (; c < dim; ++c) result[c] = w2 * sums[c];
    return;
  }
  for (; c + lanes(d) <= dim; c += lanes(d))
    hn::StoreU(hn::MulAdd(v1, hn::LoadU(d, result + c), hn::Mul(v2, hn::Load(d, sums + c))), d,
               result + c);
  for (; c < dim; ++c) result[c] = w1 * result[c] + w2 * sums[c];
}

template <class D>
HWY_INLINE void scale_row(D d, float factor, float* row, int64_t begin, int64_t end) {
  const auto f = hn::Set(d, factor);
  for (int64_t c = begin; c < end; c += lanes(d))
    hn::Store(hn::Mul(f, hn::Load(d, row + c)), d, row + c);
}

/// Prefetches the next head's rows unless they are contiguous: hardware prefetches such a stream.
template <class T>
HWY_INLINE void prefetch_next(const HeadRows<T>& rows, int64_t begin, int64_t count, int64_t dim) {
  constexpr int64_t line = 16;
  if (rows.next == nullptr || rows.stride == dim) return;
  for (int64_t i = begin; i < begin + count; ++i)
#pragma GCC unroll 4
    for (int64_t c = 0; c < dim; c += line) hwy::Prefetch(rows.next + i * rows.stride + c);
}

/// Log-sum-exps of the rows of a strip.
struct StripLse {
  float* data;
  int64_t stride, rows;
  HWY_INLINE float& operator[](int64_t row) const { return data[row * stride]; }
};

/// For each row of a strip: the reference of its softmax, and the sum of its terms.
struct StripSums {
  HWY_ALIGN float top[one_pass_strip] = {}, sum[one_pass_strip] = {};
};

/// Whether all rows of the strip see keys and none has an earlier result.
HWY_INLINE bool is_first(const StripLse& lse, const StripSums& sums) {
  bool first = true;
  for (int64_t i = 0; i < lse.rows; ++i) first &= lse[i] == minus_infinity && sums.sum[i] != 0.0F;
  return first;
}

/// Sets lse and factors = 1 / sum.
HWY_INLINE void set_lse(const StripSums& sums, const StripLse& lse, float* factors) {
  constexpr Narrow rows;
  HWY_ALIGN float logs[one_pass_strip];
  for (int64_t i = 0; i < one_pass_strip; i += lanes(rows)) {
    const auto s = hn::Load(rows, sums.sum + i);
    hn::Store(hn::Div(hn::Set(rows, 1.0F), s), rows, factors + i);
    hn::Store(hn::Add(hn::Load(rows, sums.top + i), hn::Log(rows, s)), rows, logs + i);
  }
  // hn::Log need not handle NaN: the added term keeps a NaN sum NaN.
  for (int64_t i = 0; i < lse.rows; ++i) lse[i] = logs[i] + (sums.sum[i] - sums.sum[i]);
}

/// Merges `values`, the weighted sums of a strip, into its results and lse.
HWY_INLINE void merge_strip(const OnePassTile& tile, const StripSums& sums, const float* values,
                            HeadRows<float> out, const StripLse& lse) {
  HWY_ALIGN float w1[one_pass_strip], w2[one_pass_strip], merged[one_pass_strip];
  for (int64_t i = 0; i < one_pass_strip; ++i) merged[i] = i < lse.rows ? lse[i] : minus_infinity;
  merge_factors(Narrow(), sums.top, sums.sum, one_pass_strip, w1, w2, merged);
  for (int64_t i = 0; i < lse.rows; ++i) {
    if (sums.sum[i] == 0.0F) continue;  // NaN counts as seen
    blend(values + i * tile.of_values.padded, tile.of_values.dim,
          lse[i] == minus_infinity ? 0 : w1[i], w2[i], out.data + i * out.stride);
    lse[i] = merged[i];
  }
}

template <class D>
HWY_INLINE void forward_tile(D d, const OnePassTile& tile, HeadRows<const float> q,
                             const float* k_transposed, HeadRows<const float> v,
                             HeadRows<float> out, float* lse, int64_t lse_stride, float* scores,
                             float* values) {
  StripSums sums;
  for (int64_t row = 0; row < tile.rows; row += one_pass_strip) {
    const Strip strip(d, tile, row);
    prefetch_next(q, row, strip.rows, tile.of_keys.dim);
    prefetch_next(out, row, strip.rows, tile.of_values.dim);
    if (strip.begin == strip.end) continue;
    multiply(d, strip.rows, {q.data + row * q.stride, q.stride, 1}, k_transposed + strip.begin,
             tile.columns, scores + strip.begin, tile.columns, tile.of_keys.dim,
             strip.end - strip.begin);
    softmax(d, tile, strip, scores, sums.top, sums.sum);
    const StripLse strip_lse{lse + row * lse_stride, lse_stride, strip.rows};
    const auto add_values = [&](HeadRows<float> to) HWY_ATTR {
      multiply_seen_keys<Terms::many>(tile, row, strip.rows, {scores, tile.columns, 1}, v, to,
                                      tile.of_values, false);
    };
    // Dividing the scores is cheaper than a pass over the results if the scores are fewer.
    if (tile.of_values.whole() && strip.end - strip.begin <= tile.of_values.dim &&
        is_first(strip_lse, sums)) {
      HWY_ALIGN float factors[one_pass_strip];
      set_lse(sums, strip_lse, factors);
      for (int64_t i = 0; i < strip.rows; ++i)
        scale_row(d, factors[i], scores + i * tile.columns, strip.begin, strip.end);
      add_values(out.from(row));
      continue;
    }
    add_values({values, tile.of_values.padded, nullptr});
    merge_strip(tile, sums, values, out.from(row), strip_lse);
  }
}

/// Forward pass of one strip with scores [keys][one_pass_strip].
HWY_INLINE void forward_strip(const OnePassTile& tile, HeadRows<const float> q,
                              HeadRows<const float> k, HeadRows<const float> v, HeadRows<float> out,
                              const StripLse& lse, float* scores, float* values) {
  constexpr Narrow d;
  StripSums sums;
  dot_products(d, tile, q, k, tile.of_keys.dim, scores);
  softmax_of_lanes(d, tile, scores, sums.top, sums.sum);
  const auto add_values = [&](HeadRows<float> to) HWY_ATTR {
    multiply_seen_keys<Terms::few>(tile, 0, tile.rows, {scores, 1, one_pass_strip}, v, to,
                                   tile.of_values, false);
  };
  if (is_first(lse, sums)) {
    HWY_ALIGN float factors[one_pass_strip];
    set_lse(sums, lse, factors);
    for (int64_t i = 0; i < one_pass_strip; i += lanes(d)) {
      const auto factor = hn::Load(d, factors + i);
      for (int64_t j = 0; j < tile.keys; ++j) {
        float* at = scores + j * one_pass_strip + i;
        hn::Store(hn::Mul(factor, hn::Load(d, at)), d, at);
      }
    }
    add_values(out);
  } else {
    add_values({values, tile.of_values.padded, nullptr});
    merge_strip(tile, sums, values, out, lse);
  }
}

HWY_INLINE void forward_by_dots(const OnePassTile& tile, HeadRows<const float> q,
                                HeadRows<const float> k, HeadRows<const float> v,
                                HeadRows<float> out, float* lse, int64_t lse_stride, float* scores,
                                float* values) {
  prefetch_next(q, 0, tile.rows, tile.of_keys.dim);
  prefetch_next(out, 0, tile.rows, tile.of_values.dim);
  for (int64_t row = 0; row < tile.rows; row += one_pass_strip) {
    const OnePassTile strip = tile.strip(row);
    const StripLse strip_lse{lse + row * lse_stride, lse_stride, strip.rows};
    forward_strip(strip, q.from(row), k, v, out.from(row), strip_lse, scores, values);
  }
}

void one_pass_forward(const OnePassTile& tile, HeadRows<const float> q, const OnePassKeys& k,
                      HeadRows<const float> v, HeadRows<float> out, float* lse, int64_t lse_stride,
                      float* scores, float* sums) {
  if (k.transposed == nullptr)
    return forward_by_dots(tile, q, k.rows, v, out, lse, lse_stride, scores, sums);
  with_vector(tile.keys, [&](auto d) HWY_ATTR {
    forward_tile(d, tile, q, k.transposed, v, out, lse, lse_stride, scores, sums);
  });
}

/// Replaces the products <q, k> of a strip by p, and <dO, v> by scale · ds, in all columns; hidden
/// entries become 0.
template <class D>
HWY_INLINE void differentiate(D d, const OnePassTile& tile, const Strip& strip, const float* lse,
                              const float* delta, float* p, float* d_scores) {
  const bool one_vector = strip.end - strip.begin == lanes(d);
  const bool shown = one_vector || strip.open(tile);  // no entries remain to be hidden
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

template <class D>
HWY_INLINE void backward_tile(D d, const OnePassTile& tile, const OnePassGradientInput& in,
                              HeadRows<float> d_q, HeadRows<float> d_k, HeadRows<float> d_v,
                              float* p, float* d_scores, float* sums) {
  for (int64_t row = 0; row < tile.rows; row += one_pass_strip) {
    const Strip strip(d, tile, row);
    prefetch_next(d_q, row, strip.rows, tile.of_keys.dim);
    const int64_t at = row * tile.columns + strip.begin, columns = strip.end - strip.begin;
    const auto weights_of = [&](const HeadRows<const float>& rows) {
      return Weights{rows.data + row * rows.stride, rows.stride, 1};
    };
    multiply(d, strip.rows, weights_of(in.q), in.k.transposed + strip.begin, tile.columns, p + at,
             tile.columns, tile.of_keys.dim, columns);
    multiply(d, strip.rows, weights_of(in.d_out), in.v.transposed + strip.begin, tile.columns,
             d_scores + at, tile.columns, tile.of_values.dim, columns);
    differentiate(d, tile, strip, in.lse, in.delta, p, d_scores);
    if (d_q.data == nullptr || columns == 0) continue;
    const bool direct = tile.of_keys.whole();
    const HeadRows<float> result = d_q.from(row), padded{sums, tile.of_keys.padded, nullptr};
    multiply_seen_keys<Terms::many>(tile, row, strip.rows,
                                    {d_scores + row * tile.columns, tile.columns, 1}, in.k.rows,
                                    direct ? result : padded, tile.of_keys, direct);
    if (direct) continue;
    for (int64_t i = 0; i < strip.rows; ++i)
      blend(sums + i * tile.of_keys.padded, tile.of_keys.dim, 1, 1,
            result.data + i * result.stride);
  }
  if (d_k.data == nullptr) return;
  multiply_seeing_rows<Terms::many>(tile, {p, 1, tile.columns}, in.d_out, d_v, tile.of_values);
  multiply_seeing_rows<Terms::many>(tile, {d_scores, 1, tile.columns}, in.q, d_k, tile.of_keys);
}

/// Backward pass of one strip with p and d_scores [keys][one_pass_strip].
HWY_INLINE void backward_strip(const OnePassTile& tile, const OnePassGradientInput& in,
                               HeadRows<float> d_q, HeadRows<float> d_k, HeadRows<float> d_v,
                               float* p, float* d_scores) {
  constexpr Narrow d;
  dot_products(d, tile, in.q, in.k.rows, tile.of_keys.dim, p);
  dot_products(d, tile, in.d_out, in.v.rows, tile.of_values.dim, d_scores);
  const auto scale = hn::Set(d, tile.scale);
  for (int64_t row = 0; row < one_pass_strip; row += lanes(d)) {
    const auto reference = hn::LoadU(d, in.lse + row), offset = hn::LoadU(d, in.delta + row);
    for (int64_t j = 0; j < tile.keys; ++j) {
      const int64_t at = j * one_pass_strip + row;
      const auto seen = see(d, tile, row, j);
      const auto e = exp_f32(d, hn::MulSub(scale, hn::Load(d, p + at), reference));
      const auto product = hn::Mul(e, hn::MulSub(scale, hn::Load(d, d_scores + at), offset));
      hn::Store(hn::IfThenElseZero(seen, e), d, p + at);
      hn::Store(hn::IfThenElseZero(seen, product), d, d_scores + at);
    }
  }
  if (d_q.data != nullptr)
    multiply_seen_keys<Terms::few>(tile, 0, tile.rows, {d_scores, 1, one_pass_strip}, in.k.rows,
                                   d_q, tile.of_keys, true);
  if (d_k.data == nullptr) return;
  multiply_seeing_rows<Terms::few>(tile, {p, one_pass_strip, 1}, in.d_out, d_v, tile.of_values);
  multiply_seeing_rows<Terms::few>(tile, {d_scores, one_pass_strip, 1}, in.q, d_k, tile.of_keys);
}

HWY_INLINE void backward_by_dots(const OnePassTile& tile, const OnePassGradientInput& in,
                                 HeadRows<float> d_q, HeadRows<float> d_k, HeadRows<float> d_v,
                                 float* p, float* d_scores) {
  prefetch_next(d_q, 0, tile.rows, tile.of_keys.dim);
  for (int64_t row = 0; row < tile.rows; row += one_pass_strip) {
    const OnePassGradientInput rows{in.q.from(row), in.d_out.from(row), in.k,
                                    in.v,           in.lse + row,       in.delta + row};
    const HeadRows<float> to = d_q.data == nullptr ? d_q : d_q.from(row);
    backward_strip(tile.strip(row), rows, to, d_k, d_v, p, d_scores);
  }
}

void one_pass_backward(const OnePassTile& tile, const OnePassGradientInput& in, HeadRows<float> d_q,
                       HeadRows<float> d_k, HeadRows<float> d_v, float* p, float* d_scores,
                       float* sums) {
  if (in.k.transposed == nullptr) return backward_by_dots(tile, in, d_q, d_k, d_v, p, d_scores);
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

void pack_panel(HeadRows<const float> rows, int64_t count, const HeadWidth& width, float* panel) {
  HWY_DYNAMIC_DISPATCH(pack_panel)(rows, count, width, panel);
}
void transpose_rows(HeadRows<const float> from, int64_t count, int64_t dim, int64_t columns,
                    float* to) {
  HWY_DYNAMIC_DISPATCH(transpose_rows)(from, count, dim, columns, to);
}
void one_pass_forward(const OnePassTile& tile, HeadRows<const float> q, const OnePassKeys& k,
                      HeadRows<const float> v, HeadRows<float> out, float* lse, int64_t lse_stride,
                      float* scores, float* sums) {
  HWY_DYNAMIC_DISPATCH(one_pass_forward)
  (tile, q, k, v, out, lse, lse_stride, scores, sums);
}
void one_pass_backward(const OnePassTile& tile, const OnePassGradientInput& in, HeadRows<float> d_q,
                       HeadRows<float> d_k, HeadRows<float> d_v, float* p, float* d_scores,
                       float* sums) {
  HWY_DYNAMIC_DISPATCH(one_pass_backward)(tile, in, d_q, d_k, d_v, p, d_scores, sums);
}
}  // namespace gyre
#endif  // HWY_ONCE
