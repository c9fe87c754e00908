#include "attention/kernels/lane_ops.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/lane_ops.cpp"
// The order matters: foreach_target first, -inl headers last.
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include "attention/kernels/merge-inl.hpp"
#include "runtime/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
constexpr float minus_infinity = -__builtin_inff();

#if HWY_TARGET != HWY_SCALAR
using F4 = hn::FixedTag<float, 4>;
using V4 = hn::Vec<F4>;

/// In-place transpose of the 4 x 4 matrix with rows a, b, c, d.
HWY_INLINE void transpose(V4& a, V4& b, V4& c, V4& d) {
  const F4 f;
  const hn::RepartitionToWide<F4> wide;
  const auto ab_low = hn::BitCast(wide, hn::InterleaveLower(f, a, b));   // a0 b0 a1 b1
  const auto cd_low = hn::BitCast(wide, hn::InterleaveLower(f, c, d));   // c0 d0 c1 d1
  const auto ab_high = hn::BitCast(wide, hn::InterleaveUpper(f, a, b));  // a2 b2 a3 b3
  const auto cd_high = hn::BitCast(wide, hn::InterleaveUpper(f, c, d));
  a = hn::BitCast(f, hn::InterleaveLower(wide, ab_low, cd_low));
  b = hn::BitCast(f, hn::InterleaveUpper(wide, ab_low, cd_low));
  c = hn::BitCast(f, hn::InterleaveLower(wide, ab_high, cd_high));
  d = hn::BitCast(f, hn::InterleaveUpper(wide, ab_high, cd_high));
}
constexpr int64_t block = 4;
#else
constexpr int64_t block = 0;
#endif

void pack_lanes(const float* const* rows, int64_t lanes, int64_t head_dim, float scale,
                float* packed) {
  int64_t packed_dims = 0;
#if HWY_TARGET != HWY_SCALAR
  const F4 f;
  const V4 factor = hn::Set(f, scale);
  packed_dims = head_dim / block * block;
  for (int64_t lane = 0; lane < lanes; lane += block)
    for (int64_t d = 0; d < packed_dims; d += block) {
      V4 r0 = hn::Mul(hn::LoadU(f, rows[lane] + d), factor);
      V4 r1 = hn::Mul(hn::LoadU(f, rows[lane + 1] + d), factor);
      V4 r2 = hn::Mul(hn::LoadU(f, rows[lane + 2] + d), factor);
      V4 r3 = hn::Mul(hn::LoadU(f, rows[lane + 3] + d), factor);
      transpose(r0, r1, r2, r3);
      float* to = packed + d * lane_stride + lane;
      hn::Store(r0, f, to);
      hn::Store(r1, f, to + lane_stride);
      hn::Store(r2, f, to + 2 * lane_stride);
      hn::Store(r3, f, to + 3 * lane_stride);
    }
#endif
  for (int64_t d = packed_dims; d < head_dim; ++d)
    for (int64_t lane = 0; lane < lanes; ++lane)
      packed[d * lane_stride + lane] = rows[lane][d] * scale;
}

/// Maximum over the keys of one vector of lanes.
HWY_INLINE V column_max(F f, const float* scores, int64_t keys) {
  V a = hn::Load(f, scores), b = a, c = a, d = a;
  int64_t j = 1;
  for (; j + 4 <= keys; j += 4) {
    const float* s = scores + j * lane_stride;
    a = hn::Max(a, hn::Load(f, s));
    b = hn::Max(b, hn::Load(f, s + lane_stride));
    c = hn::Max(c, hn::Load(f, s + 2 * lane_stride));
    d = hn::Max(d, hn::Load(f, s + 3 * lane_stride));
  }
  for (; j < keys; ++j) a = hn::Max(a, hn::Load(f, scores + j * lane_stride));
  return hn::Max(hn::Max(a, b), hn::Max(c, d));
}

/// scores = exp(scores - top) for one vector of lanes; returns the sum over the keys.
HWY_INLINE V column_exp(F f, float* scores, int64_t keys, V top) {
  V a = hn::Zero(f), b = a, c = a, d = a;
  const auto term = [&](float* s) HWY_ATTR {
    const V e = exp_f32(f, hn::Sub(hn::Load(f, s), top));
    hn::Store(e, f, s);
    return e;
  };
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4) {
    float* s = scores + j * lane_stride;
    a = hn::Add(a, term(s));
    b = hn::Add(b, term(s + lane_stride));
    c = hn::Add(c, term(s + 2 * lane_stride));
    d = hn::Add(d, term(s + 3 * lane_stride));
  }
  for (; j < keys; ++j) a = hn::Add(a, term(scores + j * lane_stride));
  return hn::Add(hn::Add(a, b), hn::Add(c, d));
}

void softmax_tile(float* scores, int64_t keys, int64_t lanes, LaneState state) {
  const F f;
  const V empty = hn::Set(f, minus_infinity);
  for (int64_t lane = 0; lane < lanes; lane += hn::Lanes(f)) {
    const V seen = column_max(f, scores + lane, keys);
    V top = hn::Load(f, state.top + lane);
    V sum = hn::Load(f, state.sum + lane);
    const auto outgrown = hn::Gt(seen, hn::Add(top, hn::Set(f, 8.0F)));
    if (!hn::AllFalse(f, outgrown)) {
      const V shrink = hn::IfThenElse(outgrown, exp_f32(f, hn::Sub(top, seen)), hn::Set(f, 1.0F));
      top = hn::IfThenElse(outgrown, seen, top);
      hn::Store(top, f, state.top + lane);
      sum = hn::Mul(sum, shrink);
      for (int64_t d = 0; d < state.dim; ++d) {
        float* o = state.out + d * lane_stride + lane;
        hn::Store(hn::Mul(hn::Load(f, o), shrink), f, o);
      }
    }
    // A lane without a visible key has only scores of -inf; exp(-inf - 0) is 0, -inf - -inf is NaN.
    const V reference = hn::IfThenElse(hn::Eq(top, empty), hn::Zero(f), top);
    sum = hn::Add(sum, column_exp(f, scores + lane, keys, reference));
    hn::Store(sum, f, state.sum + lane);
  }
}

/// row = w1 · row + w2 · tile[.][lane], with the instructions of blend_four_lanes, so that the bits
/// of a row do not depend on its position in a tile.
void blend_one_lane(const float* tile, int64_t lane, int64_t from, int64_t head_dim, float w1,
                    float w2, float* row) {
  const hn::CappedTag<float, 1> f;
  for (int64_t d = from; d < head_dim; ++d) {
    const auto scaled = hn::Mul(hn::Set(f, w2), hn::Load(f, tile + d * lane_stride + lane));
    hn::Store(hn::MulAdd(hn::Set(f, w1), hn::Load(f, row + d), scaled), f, row + d);
  }
}

#if HWY_TARGET != HWY_SCALAR
/// blend_one_lane for four lanes and the largest multiple of four dimensions. With `overwrite`, row
/// = w2 · tile with the same instructions; rows are not read (beta = 0).
template <bool overwrite>
void blend_four_lanes(const float* tile, int64_t lane, int64_t head_dim, const float* w1,
                      const float* w2, float* const* rows) {
  const F4 f;
  const auto blend = [&](int64_t i, int64_t d, V4 o) HWY_ATTR {
    float* row = rows[i] + d;
    const V4 scaled = hn::Mul(hn::Set(f, w2[i]), o);
    const V4 old = overwrite ? hn::Zero(f) : hn::LoadU(f, row);
    hn::StoreU(hn::MulAdd(hn::Set(f, w1[i]), old, scaled), f, row);
  };
  for (int64_t d = 0; d + block <= head_dim; d += block) {
    const float* from = tile + d * lane_stride + lane;
    V4 o0 = hn::Load(f, from), o1 = hn::Load(f, from + lane_stride);
    V4 o2 = hn::Load(f, from + 2 * lane_stride), o3 = hn::Load(f, from + 3 * lane_stride);
    transpose(o0, o1, o2, o3);
    blend(0, d, o0);
    blend(1, d, o1);
    blend(2, d, o2);
    blend(3, d, o3);
  }
}
#endif

void merge_lanes(LaneState state, int64_t lanes, float* const* rows, float* const* lse) {
  HWY_ALIGN float w1[lane_stride], w2[lane_stride], merged[lane_stride];
  const int64_t padded = (lanes + lane_granularity - 1) / lane_granularity * lane_granularity;
  for (int64_t lane = 0; lane < padded; ++lane)
    merged[lane] = lane < lanes ? *lse[lane] : minus_infinity;
  merge_factors(F(), state.top, state.sum, padded, w1, w2, merged);
  const auto saw_keys = [&](int64_t lane) {
    return state.sum[lane] != 0.0F;
  };  // NaN counts as seen
  const auto first_result = [&](int64_t at) { return *lse[at] == minus_infinity; };
  // Clears a row without an earlier result, whose contents must not be used.
  const auto open_row = [&](int64_t at) {
    if (first_result(at)) std::fill_n(rows[at], state.dim, 0.0F);
  };
  int64_t lane = 0;
#if HWY_TARGET != HWY_SCALAR
  for (; lane + block <= lanes; lane += block) {
    const bool all =
        saw_keys(lane) && saw_keys(lane + 1) && saw_keys(lane + 2) && saw_keys(lane + 3);
    const int64_t done = all ? state.dim / block * block : 0;
    if (all && first_result(lane) && first_result(lane + 1) && first_result(lane + 2) &&
        first_result(lane + 3) && done == state.dim) {
      blend_four_lanes<true>(state.out, lane, state.dim, w1 + lane, w2 + lane, rows + lane);
      continue;
    }
    for (int64_t i = lane; i < lane + block; ++i)
      if (saw_keys(i)) open_row(i);
    if (all) blend_four_lanes<false>(state.out, lane, state.dim, w1 + lane, w2 + lane, rows + lane);
    for (int64_t i = lane; i < lane + block; ++i)
      if (saw_keys(i)) blend_one_lane(state.out, i, done, state.dim, w1[i], w2[i], rows[i]);
  }
#endif
  for (; lane < lanes; ++lane)
    if (saw_keys(lane)) {
      open_row(lane);
      blend_one_lane(state.out, lane, 0, state.dim, w1[lane], w2[lane], rows[lane]);
    }
  for (int64_t i = 0; i < lanes; ++i)
    if (saw_keys(i)) *lse[i] = merged[i];
}

void add_lanes(const float* tile, int64_t lanes, int64_t head_dim, float factor,
               float* const* rows) {
  int64_t lane = 0;
#if HWY_TARGET != HWY_SCALAR
  const float ones[block] = {1, 1, 1, 1}, factors[block] = {factor, factor, factor, factor};
  for (; lane + block <= lanes; lane += block) {
    blend_four_lanes<false>(tile, lane, head_dim, ones, factors, rows + lane);
    for (int64_t i = lane; i < lane + block; ++i)
      blend_one_lane(tile, i, head_dim / block * block, head_dim, 1, factor, rows[i]);
  }
#endif
  for (; lane < lanes; ++lane) blend_one_lane(tile, lane, 0, head_dim, 1, factor, rows[lane]);
}

void gradient_tile(float* scores, float* products, int64_t keys, int64_t lanes, const float* lse,
                   const float* delta) {
  const F f;
  for (int64_t lane = 0; lane < lanes; lane += hn::Lanes(f)) {
    const V reference = hn::Load(f, lse + lane), offset = hn::Load(f, delta + lane);
    for (int64_t j = 0; j < keys; ++j) {
      float* s = scores + j * lane_stride + lane;
      float* g = products + j * lane_stride + lane;
      const V p = exp_f32(f, hn::Sub(hn::Load(f, s), reference));
      hn::Store(p, f, s);
      hn::Store(hn::Mul(p, hn::Sub(hn::Load(f, g), offset)), f, g);
    }
  }
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
HWY_EXPORT(pack_lanes);
HWY_EXPORT(softmax_tile);
HWY_EXPORT(merge_lanes);
HWY_EXPORT(gradient_tile);
HWY_EXPORT(add_lanes);

void pack_lanes(const float* const* rows, int64_t lanes, int64_t head_dim, float scale,
                float* packed) {
  HWY_DYNAMIC_DISPATCH(pack_lanes)(rows, lanes, head_dim, scale, packed);
}
void softmax_tile(float* scores, int64_t keys, int64_t lanes, LaneState state) {
  HWY_DYNAMIC_DISPATCH(softmax_tile)(scores, keys, lanes, state);
}
void merge_lanes(LaneState state, int64_t lanes, float* const* rows, float* const* lse) {
  HWY_DYNAMIC_DISPATCH(merge_lanes)(state, lanes, rows, lse);
}
void gradient_tile(float* scores, float* products, int64_t keys, int64_t lanes, const float* lse,
                   const float* delta) {
  HWY_DYNAMIC_DISPATCH(gradient_tile)(scores, products, keys, lanes, lse, delta);
}
void add_lanes(const float* tile, int64_t lanes, int64_t head_dim, float factor,
               float* const* rows) {
  HWY_DYNAMIC_DISPATCH(add_lanes)(tile, lanes, head_dim, factor, rows);
}
}  // namespace gyre
#endif  // HWY_ONCE
