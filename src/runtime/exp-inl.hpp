// Vector exponential for f32, compiled once per Highway target. Include after hwy/highway.h, inside
// a file that Highway includes once per target (hence no #pragma once).

#if defined(GYRE_RUNTIME_EXP_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_RUNTIME_EXP_INL_HPP_
#undef GYRE_RUNTIME_EXP_INL_HPP_
#else
#define GYRE_RUNTIME_EXP_INL_HPP_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {

/// Maximum of `least` and x; NaN if x is NaN.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V at_least(D /*d*/, V least, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
#if HWY_ARCH_X86 && HWY_TARGET < HWY_EMU128
  return hn::Max(least, x);  // returns the second operand if one is NaN
#else
  return hn::IfThenElse(hn::Lt(x, least), least, x);
#endif
}

/// exp_f32 is exactly 0 below this.
constexpr float least_exponent = -88.0F;

/// e^x for least_exponent <= x <= 80. The relative error is below 1e-7 + 1.4e-8·|x|, less than that
/// of rounding x to f32 (6e-8·|x|). e^0 is exactly 1, results below 1.2e-38 are exactly 0, NaN
/// stays NaN.
///
/// e^x = 2^n · 2^r with n = round(x / ln 2) and |r| <= 1/2; 2^r is a minimax polynomial of degree 6
/// (relative error 2e-9). It takes 13 instructions, half of hwy/contrib's Exp; the difference is
/// measurable in softmax over narrow heads.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V exp_f32_in_range(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const V log2_e = hn::Set(d, 1.44269504088896341F);
  // Adding 1.5 · 2^23 rounds to an integer in the low bits; 127 more make it the biased exponent.
  const V magic = hn::Set(d, 12582912.0F + 127.0F);
  const V biased = hn::MulAdd(x, log2_e, magic);
  const V r = hn::MulSub(x, log2_e, hn::Sub(biased, magic));
  V p = hn::Set(d, 1.53458124e-4F);
  p = hn::MulAdd(p, r, hn::Set(d, 1.33999309e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 9.61848907e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 5.55032864e-2F));
  p = hn::MulAdd(p, r, hn::Set(d, 2.40226462e-1F));
  p = hn::MulAdd(p, r, hn::Set(d, 6.93147182e-1F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  const hn::RebindToSigned<D> di;
  const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, biased)));  // 0 for n = -127
  return hn::Mul(p, power);
}

/// Like exp_f32_in_range, for any x <= 80, including -inf.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V exp_f32(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  return exp_f32_in_range(d, at_least(d, hn::Set(d, least_exponent), x));
}

/// 2^y for y = z · scale - whole, with an integer `whole`, for scans that are bound by the
/// floating-point pipes. 2^y = power · polynomial(rest); the last product can be part of an FMA.
/// With AVX-512, y is rounded to 1/32 and the fraction is looked up in a table of two registers.
/// Degree 2 then suffices for the rest: relative error below 1.3e-7, with 5 instructions on the FMA
/// pipes instead of 10 in exp_f32_in_range. Elsewhere y is rounded to an integer.
///
/// z · scale is not rounded before `whole` is subtracted (if HWY_NATIVE_FMA), so z needs no prior
/// subtraction of a common offset. |z · scale| and |whole| must be below largest_exponent, and y in
/// [-127, 120); 2^-127 yields 0. NaN stays NaN.
template <class D>
struct Exp2Scale {
  using V = hwy::HWY_NAMESPACE::Vec<D>;
#if HWY_TARGET <= HWY_AVX3
  // Adding 1.5 · 2^18 rounds to 1/32.
  static constexpr float rounding = 393216.0F;
  V low, high;  // bits of 2^(i/32) minus i << 18, which the shifted y adds again
#else
  static constexpr float rounding = 12582912.0F + 127.0F;
#endif
  V scale, magic;

  HWY_INLINE Exp2Scale(D d, float scale_, float whole)
      : scale(hwy::HWY_NAMESPACE::Set(d, scale_)),
        magic(hwy::HWY_NAMESPACE::Set(d, rounding - whole)) {
#if HWY_TARGET <= HWY_AVX3
    alignas(64) static constexpr uint32_t table[32] = {
        0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3,
        0x3f78f4f0, 0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b,
        0x3f75583f, 0x3f7523f6, 0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a,
        0x3f75b9be, 0x3f76248c, 0x3f76a81e, 0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907,
        0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3};
    const hwy::HWY_NAMESPACE::RebindToUnsigned<D> du;
    low = hwy::HWY_NAMESPACE::BitCast(d, hwy::HWY_NAMESPACE::Load(du, table));
    high = hwy::HWY_NAMESPACE::BitCast(d, hwy::HWY_NAMESPACE::Load(du, table + 16));
#endif
  }

  struct Parts {
    V power, rest;
  };
  HWY_INLINE Parts split(D d, V z) const {
    namespace hn = hwy::HWY_NAMESPACE;
    const hn::RebindToUnsigned<D> du;
    const V rounded = hn::MulAdd(z, scale, magic);
    const V rest = hn::MulSub(z, scale, hn::Sub(rounded, magic));
#if HWY_TARGET <= HWY_AVX3
    const V fraction{_mm512_permutex2var_ps(low.raw, hn::BitCast(du, rounded).raw, high.raw)};
    const auto power =
        hn::Add(hn::ShiftLeft<18>(hn::BitCast(du, rounded)), hn::BitCast(du, fraction));
#else
    const auto power = hn::ShiftLeft<23>(hn::BitCast(du, rounded));  // 0 for -127
#endif
    return {hn::BitCast(d, power), rest};
  }
};
constexpr float largest_exponent = 65536.0F;
constexpr float least_exponent_of_2 = -127.0F;

/// factor · 2^rest for the `rest` of Exp2Scale.
template <class D>
struct Exp2Polynomial {
  using V = hwy::HWY_NAMESPACE::Vec<D>;
#if HWY_TARGET <= HWY_AVX3
  static constexpr float coefficients[] = {1.0F, 6.93157315e-1F, 2.40226507e-1F};
#else
  static constexpr float coefficients[] = {1.0F,           6.93147182e-1F, 2.40226462e-1F,
                                           5.55032864e-2F, 9.61848907e-3F, 1.33999309e-3F,
                                           1.53458124e-4F};
#endif
  static constexpr int degree = sizeof(coefficients) / sizeof(float) - 1;
  V c[degree + 1];

  HWY_INLINE explicit Exp2Polynomial(D d, float factor = 1) {
    namespace hn = hwy::HWY_NAMESPACE;
    for (int i = 0; i <= degree; ++i) c[i] = hn::Set(d, factor * coefficients[i]);
  }
  HWY_INLINE V operator()(V rest) const {
    namespace hn = hwy::HWY_NAMESPACE;
    V p = c[degree];
    for (int i = degree - 1; i >= 0; --i) p = hn::MulAdd(p, rest, c[i]);
    return p;
  }
};

}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
