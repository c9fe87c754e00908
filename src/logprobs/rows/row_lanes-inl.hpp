// Rows of f32 or bf16 as vectors of f32, compiled once per Highway target. Include after
// hwy/highway.h, inside a file that Highway includes once per target (hence no #pragma once).
//
// Elements come in pairs of vectors. One register holds 2 N elements of bf16, and splitting it in
// memory order would cost a permutation. A pair therefore holds its even and its odd elements, one
// instruction each. If f32 and bf16 rows are combined, both are in memory order.

#if defined(GYRE_LOGPROBS_ROW_LANES_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_LOGPROBS_ROW_LANES_INL_HPP_
#undef GYRE_LOGPROBS_ROW_LANES_INL_HPP_
#else
#define GYRE_LOGPROBS_ROW_LANES_INL_HPP_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "core/bf16.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
using Words = hn::Repartition<uint32_t, F>;
#if HWY_TARGET != HWY_SCALAR  // whose vectors are one element of any size
using Halves = hn::Repartition<uint16_t, F>;
#endif

inline constexpr float minus_infinity = -__builtin_inff();
inline constexpr float log2_e = 1.44269504088896341F;
inline constexpr int64_t line_bytes = 64;

struct Pair {
  V a, b;
};

template <class T>
HWY_INLINE T narrow(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return to_bf16(x);
}

/// Whether a pair holds the even and the odd elements: true if all rows are bf16.
template <class... T>
inline constexpr bool even_odd = (std::is_same_v<T, bf16> && ...);

#if HWY_TARGET != HWY_SCALAR
template <bool evens_first>
HWY_INLINE Pair load_halves(F f, const uint16_t* from) {
  const Words words;
  if constexpr (evens_first) {
    const auto both = hn::BitCast(words, hn::LoadU(Halves(), from));
    return {hn::BitCast(f, hn::ShiftLeft<16>(both)),
            hn::BitCast(f, hn::And(both, hn::Set(words, 0xffff0000U)))};
  } else {
    const hn::Half<Halves> part;
    const auto a = hn::PromoteTo(words, hn::LoadU(part, from));
    const auto b = hn::PromoteTo(words, hn::LoadU(part, from + hn::Lanes(f)));
    return {hn::BitCast(f, hn::ShiftLeft<16>(a)), hn::BitCast(f, hn::ShiftLeft<16>(b))};
  }
}

/// Stores as bf16, rounded to nearest, ties away from zero: two instructions fewer than to even.
template <bool evens_first>
HWY_INLINE void store_halves(const Pair& x, uint16_t* to, bool stream) {
  const Words words;
  const Halves halves;
  const auto half = hn::Set(words, 0x8000U);
  const auto a = hn::ShiftRight<16>(hn::Add(hn::BitCast(words, x.a), half));
  const auto b = hn::Add(hn::BitCast(words, x.b), half);
  hn::Vec<Halves> both;
  if constexpr (evens_first) {
    both = hn::OddEven(hn::BitCast(halves, b), hn::BitCast(halves, a));
  } else {
    const hn::RebindToSigned<Words> integers;
    const hn::Half<Halves> part;
    both = hn::Combine(halves, hn::DemoteTo(part, hn::BitCast(integers, hn::ShiftRight<16>(b))),
                       hn::DemoteTo(part, hn::BitCast(integers, a)));
  }
  if (stream)
    hn::Stream(both, halves, to);
  else
    hn::StoreU(both, halves, to);
}
#endif

/// Loads one vector, in memory order.
HWY_INLINE V load(F f, const float* from) {
  return hn::LoadU(f, from);
}
HWY_INLINE V load(F f, const bf16* from) {
  const hn::Rebind<uint16_t, F> half;
  const auto bits = hn::LoadU(half, &from->bits);
  return hn::BitCast(f, hn::ShiftLeft<16>(hn::PromoteTo(Words(), bits)));
}

template <bool evens_first, class T>
HWY_INLINE Pair load_pair(F f, const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return {hn::LoadU(f, from), hn::LoadU(f, from + hn::Lanes(f))};
  } else {
#if HWY_TARGET == HWY_SCALAR
    return {hn::Set(f, to_float(from[0])), hn::Set(f, to_float(from[1]))};
#else
    return load_halves<evens_first>(f, &from->bits);
#endif
  }
}
/// With `stream`, `to` must be aligned to a vector and the store bypasses the caches.
template <bool evens_first, class T>
HWY_INLINE void store_pair(F f, const Pair& x, T* to, bool stream) {
  if constexpr (std::is_same_v<T, float>) {
    if (stream) {
      hn::Stream(x.a, f, to);
      hn::Stream(x.b, f, to + hn::Lanes(f));
    } else {
      hn::StoreU(x.a, f, to);
      hn::StoreU(x.b, f, to + hn::Lanes(f));
    }
  } else {
#if HWY_TARGET == HWY_SCALAR
    (void)f, (void)stream;
    to[0] = to_bf16(hn::GetLane(x.a)), to[1] = to_bf16(hn::GetLane(x.b));
#else
    (void)f;
    store_halves<evens_first>(x, &to->bits, stream);
#endif
  }
}

/// Like load_pair for fewer elements than a pair; the others are -inf.
template <bool evens_first, class T>
HWY_INLINE Pair load_part(F f, const T* from, int64_t count) {
  HWY_ALIGN T padded[2 * HWY_MAX_BYTES / sizeof(float)];
  std::fill_n(padded, 2 * hn::Lanes(f), narrow<T>(minus_infinity));
  std::memcpy(padded, from, count * sizeof(T));
  return load_pair<evens_first>(f, padded);
}
template <bool evens_first, class T>
HWY_INLINE void store_part(F f, const Pair& x, T* to, int64_t count) {
  HWY_ALIGN T padded[2 * HWY_MAX_BYTES / sizeof(float)];
  store_pair<evens_first>(f, x, padded, false);
  std::memcpy(to, padded, count * sizeof(T));
}

template <class T>
HWY_INLINE void prefetch_pair(F f, const T* from, int64_t bytes_ahead) {
  const char* at = reinterpret_cast<const char*>(from) + bytes_ahead;
  const int64_t bytes = 2 * hn::Lanes(f) * sizeof(T);
  for (int64_t i = 0; i < bytes; i += line_bytes) hwy::Prefetch(at + i);
}

/// Calls body(pointer to the first element of row r) with the matrix's type.
template <class Matrix, class Body>
HWY_INLINE void with_row(const Matrix& matrix, int64_t r, const Body& body) {
  if (matrix.type == DType::f32)
    body(matrix.template as<float>().row(r));
  else
    body(matrix.template as<bf16>().row(r));
}

/// Origin of a row's exponents: y = (z - shift) · scale - whole. The shift is 0 if `whole`
/// suffices, which saves an instruction.
struct Origin {
  float shift = 0;
  float whole = 0;

  /// Origin with y = 0 near `max`, which must be finite.
  static Origin at(float max, float scale) {
    const float y = max * scale;
    if (HWY_NATIVE_FMA && y > -largest_exponent && y < largest_exponent)
      return {0, std::nearbyint(y)};
    return {max, 0};
  }
  double exponent_of(float z, float scale) const {
    return (z - static_cast<double>(shift)) * scale - whole;
  }
};

/// 2^y, y as in Origin, for any z except NaN, +inf and values far above the origin; 0 if the result
/// is below 2^-126 and for z = -inf.
template <bool shifted>
struct Exponential {
  Exp2Scale<F> scale;
  V shift, least;

  HWY_INLINE Exponential(F f, float scale_, const Origin& origin)
      : scale(f, scale_, origin.whole),
        shift(hn::Set(f, origin.shift)),
        least(hn::Set(f, (least_exponent_of_2 + origin.whole) / scale_)) {}
  /// Returns z - shift, limited below to where 2^y is 0: finite even if z is -inf.
  HWY_INLINE V clamp(V z) const {
    if constexpr (shifted) z = hn::Sub(z, shift);
    return at_least(F(), least, z);
  }
  HWY_INLINE Exp2Scale<F>::Parts split(F f, V z) const { return scale.split(f, clamp(z)); }
};

template <class Op, class... X>
HWY_INLINE Pair apply(const Op& op, const X&... x) {
  return {op(x.a...), op(x.b...)};
}

/// to[i] = op(from[i]...). Each element is independent, so results do not depend on alignment or
/// position. A `from` may be `to`. `stream`: bypass the caches.
template <class Op, class To, class... From>
void map_row(F f, const Op& op, int64_t count, bool stream, To* to, const From*... from) {
  constexpr bool evens_first = even_odd<To, From...>;
  [[maybe_unused]] constexpr int64_t bytes_ahead = 12288;
  const int64_t n = 2 * hn::Lanes(f);
  int64_t i = 0;
  if (stream) {
    constexpr uintptr_t vector_bytes = hn::MaxLanes(F()) * sizeof(float);
    const auto off = reinterpret_cast<uintptr_t>(to) % vector_bytes;
    i = std::min<int64_t>(count, (vector_bytes - off) % vector_bytes / sizeof(To));
    if (i > 0) store_part<evens_first>(f, apply(op, load_part<evens_first>(f, from, i)...), to, i);
  }
  for (; i + n <= count; i += n) {
    (prefetch_pair(f, from + i, bytes_ahead), ...);
    store_pair<evens_first>(f, apply(op, load_pair<evens_first>(f, from + i)...), to + i, stream);
  }
  if (i < count)
    store_part<evens_first>(f, apply(op, load_part<evens_first>(f, from + i, count - i)...), to + i,
                            count - i);
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
