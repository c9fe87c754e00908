// Visible keys of the rows of a tile, and the softmax of its products, compiled once per Highway
// target. Include after hwy/highway.h and hwy/contrib/math/math-inl.h, inside a file that Highway
// includes once per target (hence no #pragma once).

#if defined(GYRE_ATTENTION_KERNELS_ONE_PASS_SOFTMAX_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_ATTENTION_KERNELS_ONE_PASS_SOFTMAX_INL_HPP_
#undef GYRE_ATTENTION_KERNELS_ONE_PASS_SOFTMAX_INL_HPP_
#else
#define GYRE_ATTENTION_KERNELS_ONE_PASS_SOFTMAX_INL_HPP_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "attention/kernels/one_pass_ops.hpp"
#include "attention/kernels/one_pass_products-inl.hpp"
#include "runtime/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr float minus_infinity = -__builtin_inff();

/// Rows [row, row + rows) of a tile. They see only keys in [first, last), which lie in columns
/// [begin, end).
struct Strip {
  int64_t row, rows, first, last, begin, end;
  template <class D>
  HWY_INLINE Strip(D d, const OnePassTile& tile, int64_t row_)
      : row(row_), rows(std::min(one_pass_strip, tile.rows - row_)) {
    first = tile.begin[row];
    last = std::max<int64_t>(first, tile.end[row + rows - 1]);
    begin = first & -lanes(d);
    end = std::min((last + lanes(d) - 1) & -lanes(d), tile.columns);
    if (first == last) end = begin;
  }
  /// Whether all rows see all columns.
  HWY_INLINE bool open(const OnePassTile& tile) const {
    return tile.begin[row + rows - 1] <= begin && tile.end[row] >= end;
  }
};

/// Columns [begin, end) that one row sees, and whole vectors [first, last) that hold them. If the
/// row sees none, both are empty.
struct Span {
  int64_t begin, end, first, last;
  template <class D>
  HWY_INLINE Span(D d, const OnePassTile& tile, int64_t row)
      : begin(tile.begin[row]), end(std::max(tile.begin[row], tile.end[row])) {
    first = begin & -lanes(d);
    if (begin == end) begin = end = first;
    last = (end + lanes(d) - 1) & -lanes(d);
  }
};

template <class D>
HWY_INLINE void fill(D d, float* row, int64_t begin, int64_t end, float value) {
  for (int64_t c = begin; c < end; c += lanes(d)) hn::Store(hn::Set(d, value), d, row + c);
}

/// Overwrites the columns of [begin, end) that a row does not see.
template <class D>
HWY_INLINE void hide(D d, float* row, const Span& span, int64_t begin, int64_t end, float value) {
  const auto v = hn::Set(d, value);
  fill(d, row, begin, span.first, value);
  if (span.begin != span.first) {
    const auto hidden = hn::FirstN(d, span.begin - span.first);
    float* first = row + span.first;
    hn::Store(hn::IfThenElse(hidden, v, hn::Load(d, first)), d, first);
  }
  if (span.end != span.last) {
    float* last = row + span.last - lanes(d);
    const auto seen = hn::FirstN(d, lanes(d) - (span.last - span.end));
    hn::Store(hn::IfThenElse(seen, hn::Load(d, last), v), d, last);
  }
  fill(d, row, span.last, end, value);
}

/// Column numbers of a vector, from `first` on. Slow: call once.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> columns_from(D, int64_t first) {
  return hn::Iota(hn::RebindToSigned<D>(), static_cast<int32_t>(first));
}

/// Mask of the columns of a vector that are in [begin, end).
template <class D>
HWY_INLINE hn::Mask<D> within(D d, hn::Vec<hn::RebindToSigned<D>> columns, int32_t begin,
                              int32_t end) {
  const hn::RebindToSigned<D> integers;
  return hn::RebindMask(d, hn::AndNot(hn::Lt(columns, hn::Set(integers, begin)),
                                      hn::Lt(columns, hn::Set(integers, end))));
}

/// Mask of the rows of a vector, from `row` on, that see a key.
template <class D>
HWY_INLINE hn::Mask<D> see(D d, const OnePassTile& tile, int64_t row, int64_t key) {
  const hn::RebindToSigned<D> integers;
  const auto at = hn::Set(integers, static_cast<int32_t>(key));
  return hn::RebindMask(d, hn::AndNot(hn::Gt(hn::LoadU(integers, tile.begin + row), at),
                                      hn::Gt(hn::LoadU(integers, tile.end + row), at)));
}

/// softmax() for a row whose columns are one vector, entirely in registers.
template <class D>
HWY_INLINE void softmax_of_vector(D d, hn::Mask<D> seen, float scale, float* row, float* top,
                                  float* sum) {
  using V = hn::Vec<D>;
  const V empty = hn::Set(d, minus_infinity), scales = hn::Set(d, scale);
  const V product = hn::IfThenElse(seen, hn::Load(d, row), empty);
  const V largest = hn::Mul(scales, hn::MaxOfLanes(d, product));
  const V reference = hn::IfThenElse(hn::Eq(largest, empty), hn::Zero(d), largest);
  const V e = exp_f32(d, hn::MulSub(scales, product, reference));
  hn::Store(e, d, row);
  *top = hn::GetLane(largest);
  *sum = hn::GetLane(hn::SumOfLanes(d, e));
}

/// Replaces the products of a strip by exp(scale · product - top); hidden ones become 0. Each step
/// loops over all rows, since successive steps of one row depend on each other.
template <class D>
HWY_INLINE void softmax(D d, const OnePassTile& tile, const Strip& strip, float* scores, float* top,
                        float* sum) {
  using V = hn::Vec<D>;
  if (strip.end - strip.begin == lanes(d)) {
    const auto columns = columns_from(d, strip.begin);
    for (int64_t i = 0; i < strip.rows; ++i) {
      const int64_t at = strip.row + i;
      softmax_of_vector(d, within(d, columns, tile.begin[at], tile.end[at]), tile.scale,
                        scores + i * tile.columns + strip.begin, top + i, sum + i);
    }
    return;
  }
  const V empty = hn::Set(d, minus_infinity), scale = hn::Set(d, tile.scale);
  if (!strip.open(tile))
    for (int64_t i = 0; i < strip.rows; ++i)
      hide(d, scores + i * tile.columns, Span(d, tile, strip.row + i), strip.begin, strip.end,
           minus_infinity);
  for (int64_t i = 0; i < strip.rows; ++i) {
    const float* row = scores + i * tile.columns;
    V largest = hn::Load(d, row + strip.begin);
    for (int64_t c = strip.begin + lanes(d); c < strip.end; c += lanes(d))
      largest = hn::Max(largest, hn::Load(d, row + c));
    top[i] = tile.scale * hn::GetLane(hn::MaxOfLanes(d, largest));
  }
  for (int64_t i = 0; i < strip.rows; ++i) {
    float* row = scores + i * tile.columns;
    const V largest = hn::Set(d, top[i]);
    // exp(-inf - 0) is 0, but -inf - -inf is NaN.
    const V reference = hn::IfThenElse(hn::Eq(largest, empty), hn::Zero(d), largest);
    V total = hn::Zero(d);
    for (int64_t c = strip.begin; c < strip.end; c += lanes(d)) {
      const V e = exp_f32(d, hn::MulSub(scale, hn::Load(d, row + c), reference));
      hn::Store(e, d, row + c);
      total = hn::Add(total, e);
    }
    sum[i] = hn::GetLane(hn::SumOfLanes(d, total));
  }
}

/// softmax() for the output of dot_products(), whose lanes are rows.
template <class D>
HWY_INLINE void softmax_of_lanes(D d, const OnePassTile& tile, float* scores, float* top,
                                 float* sum) {
  using V = hn::Vec<D>;
  const V empty = hn::Set(d, minus_infinity), scale = hn::Set(d, tile.scale);
  for (int64_t row = 0; row < one_pass_strip; row += lanes(d)) {
    V largest = empty, total = hn::Zero(d);
    for (int64_t j = 0; j < tile.keys; ++j) {
      float* at = scores + j * one_pass_strip + row;
      const V product = hn::IfThenElse(see(d, tile, row, j), hn::Load(d, at), empty);
      hn::Store(product, d, at);
      largest = hn::Max(largest, product);
    }
    largest = hn::Mul(scale, largest);
    const V reference = hn::IfThenElse(hn::Eq(largest, empty), hn::Zero(d), largest);
    for (int64_t j = 0; j < tile.keys; ++j) {
      float* at = scores + j * one_pass_strip + row;
      const V e = exp_f32(d, hn::MulSub(scale, hn::Load(d, at), reference));
      hn::Store(e, d, at);
      total = hn::Add(total, e);
    }
    hn::Store(largest, d, top + row);
    hn::Store(total, d, sum + row);
  }
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
