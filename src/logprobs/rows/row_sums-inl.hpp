// Range and sums of exponentials of a row's blocks, compiled once per Highway target. Include after
// hwy/highway.h, inside a file that Highway includes once per target (hence no #pragma once).

#if defined(GYRE_LOGPROBS_ROW_SUMS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_LOGPROBS_ROW_SUMS_INL_HPP_
#undef GYRE_LOGPROBS_ROW_SUMS_INL_HPP_
#else
#define GYRE_LOGPROBS_ROW_SUMS_INL_HPP_
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "logprobs/rows/row_lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {

/// Columns per block, whose sums are f32.
inline constexpr int64_t block_columns = 4096;
/// Prefetch distance in bytes.
inline constexpr int64_t bytes_ahead = 12288;

/// Sums move to a new origin if a block's maximum has an exponent above this.
inline constexpr double highest_exponent = 32;

/// Largest element, and minimum of the elements and 0; both valid only without NaN and +inf.
struct Range {
  float top = minus_infinity, low = 0;
  bool regular = true;

  void add(const Range& other) {
    top = std::max(top, other.top);
    low = std::min(low, other.low);
    regular = regular && other.regular;
  }
};

template <class T>
Range short_range(const T* z, int64_t count) {
  Range range;
  for (int64_t i = 0; i < count; ++i) {
    const float x = to_float(z[i]);
    if (!(x < __builtin_inff())) range.regular = false;
    range.top = std::max(range.top, x);
    range.low = std::min(range.low, x);
  }
  return range;
}

#if HWY_TARGET == HWY_SCALAR
template <class T>
class RangeLanes {
 public:
  explicit RangeLanes(const T*) {}
  void add(const T* z) { range_.add(short_range(z, 2)); }
  Range range(const T*, int64_t) const { return range_; }

 private:
  Range range_;
};
#else
/// Range of pairs of vectors, from their bits: positive floats order like signed integers, negative
/// floats in reverse order of unsigned integers.
template <class T>
class RangeLanes {
 public:
  HWY_INLINE explicit RangeLanes(const T* z)
      : positive_(hn::BitCast(Signed(), load(z))),
        positive_b_(positive_),
        negative_(load(z)),
        negative_b_(negative_) {}
  HWY_INLINE void add(const T* z) {
    add_to(load(z), positive_, negative_);
    if constexpr (sizeof(T) == sizeof(float)) add_to(load(z + n), positive_b_, negative_b_);
  }
  /// Range of all added elements: `count` from z on.
  Range range(const T* z, int64_t count) const {
    constexpr Integer infinity =
        sizeof(T) == sizeof(float) ? Integer(0x7f800000U) : Integer(0x7f80U);
    constexpr auto sign = static_cast<Integer>(Integer(1) << (8 * sizeof(T) - 1));
    const auto positive = hn::Max(positive_, positive_b_);
    const auto negative = hn::Max(negative_, negative_b_);
    const auto largest = hn::BitCast(Signed(), hn::Set(Bits(), static_cast<Integer>(infinity - 1)));
    const auto lowest = hn::Set(Bits(), static_cast<Integer>(infinity | sign));
    Range range;
    range.regular = hn::AllFalse(Signed(), hn::Gt(positive, largest)) &&
                    hn::AllFalse(Bits(), hn::Gt(negative, lowest));
    if (!range.regular) return range;
    range.top = top_of(hn::BitCast(Bits(), positive));
    const Pair below = floats_of(negative);
    range.low = std::min(0.0F, hn::GetLane(hn::MinOfLanes(F(), hn::Min(below.a, below.b))));
    if (std::signbit(range.top)) range.top = top_of(least_bits(z, count));
    return range;
  }

 private:
  using Bits = std::conditional_t<std::is_same_v<T, float>, Words, Halves>;
  using Integer = hn::TFromD<Bits>;
  using Signed = hn::RebindToSigned<Bits>;
  using Lanes = hn::Vec<Bits>;
  static constexpr int64_t n = hn::MaxLanes(Bits());

  static HWY_INLINE Lanes load(const T* z) {
    if constexpr (std::is_same_v<T, float>)
      return hn::BitCast(Bits(), hn::LoadU(F(), z));
    else
      return hn::LoadU(Bits(), &z->bits);
  }
  static HWY_INLINE void add_to(Lanes x, hn::Vec<Signed>& positive, Lanes& negative) {
    positive = hn::Max(positive, hn::BitCast(Signed(), x));
    negative = hn::Max(negative, x);
  }
  static HWY_INLINE Pair floats_of(Lanes x) {
    if constexpr (std::is_same_v<T, float>) {
      return {hn::BitCast(F(), x), hn::BitCast(F(), x)};
    } else {
      const auto both = hn::BitCast(Words(), x);
      return {hn::BitCast(F(), hn::ShiftLeft<16>(both)),
              hn::BitCast(F(), hn::And(both, hn::Set(Words(), 0xffff0000U)))};
    }
  }
  /// MaxOfLanes is not used: in Highway 1.0's EMU128 it never returns less than the lowest finite
  /// number, so not -inf.
  static float top_of(Lanes x) {
    const Pair floats = floats_of(x);
    HWY_ALIGN std::array<float, hn::MaxLanes(F())> lanes;
    hn::Store(hn::Max(floats.a, floats.b), F(), lanes.data());
    return *std::max_element(lanes.begin(), lanes.end());
  }
  /// If all elements are negative, the largest has the smallest bits.
  static Lanes least_bits(const T* z, int64_t count) {
    Lanes least = load(z);
    for (int64_t i = 0; i + n <= count; i += n) least = hn::Min(least, load(z + i));
    return least;
  }

  hn::Vec<Signed> positive_, positive_b_;
  Lanes negative_, negative_b_;
};
#endif

/// Range of any number of elements.
template <class T>
Range range_of(F f, const T* z, int64_t count) {
  const int64_t n = 2 * hn::Lanes(f);
  const int64_t pairs = count / n * n;
  Range range = short_range(z + pairs, count - pairs);
  if (pairs == 0) return range;
  RangeLanes<T> lanes(z);
  for (int64_t i = 0; i < pairs; i += n) lanes.add(z + i);
  range.add(lanes.range(z, pairs));
  return range;
}

/// Running sums of a row: of 2^y, with exponents y relative to the origin, and of (z - reference)
/// 2^y.
struct Sums {
  float scale = 0;  // factor of the exponents: base 2
  float max = minus_infinity;
  float reference = 0;  // maximum when the origin was chosen
  Origin origin;
  double sum = 0, weighted = 0;

  bool started() const { return max != minus_infinity; }
  /// Whether elements up to `top` need a new origin.
  bool outgrown(float top) const {
    return top != minus_infinity &&
           (!started() || origin.exponent_of(top, scale) > highest_exponent);
  }
  /// Moves the origin if elements up to `top` need it. Returns the factor applied to the sums of
  /// 2^y.
  double raise(float top) {
    const bool first = !started(), enough = !outgrown(top);
    max = std::max(max, top);
    if (enough) return 1;
    const Origin old = origin;
    const double distance = reference - static_cast<double>(top);
    origin = Origin::at(top, scale);
    reference = top;
    const double moved =
        (old.shift - static_cast<double>(origin.shift)) * scale + old.whole - origin.whole;
    const double factor = first ? 0 : std::exp2(moved);
    weighted = factor == 0 ? 0 : (weighted + distance * sum) * factor;
    sum *= factor;
    return factor;
  }
  /// Sum of e^(x - max). It is at least 1, the maximum's own term, so that rounding makes no
  /// probability exceed 1. Replaces that term, as computed, by the exact 1.
  double sum_to_max(F f) const {
    const Exponential<true> exponential(f, scale, origin);
    const auto parts = exponential.split(f, hn::Set(f, max));
    const V term = hn::Mul(Exp2Polynomial<F>(f)(parts.rest), parts.power);
    const double to_max = exponent_to_max(), own = std::exp2(-to_max);
    return std::max(1.0, (sum + (own - hn::GetLane(term))) / own);
  }
  /// Sum of x e^x with x = (z - max) · natural_scale.
  double weighted_to_max(float natural_scale) const {
    const double distance = reference - static_cast<double>(max);
    return std::min(0.0,
                    natural_scale * (weighted + distance * sum) * std::exp2(exponent_to_max()));
  }
  /// 2 to this power converts sums of 2^y to sums relative to the maximum.
  double exponent_to_max() const { return -origin.exponent_of(max, scale); }
  bool clamp_needed(float low) const {
    return origin.shift != 0 || !HWY_NATIVE_FMA ||
           low * scale < origin.whole + least_exponent_of_2 + 2;
  }
};

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
