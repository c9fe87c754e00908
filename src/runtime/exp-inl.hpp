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

/// Below this exp_f32 is exactly 0.
constexpr float least_exponent = -88.0F;

/// e^x for least_exponent <= x <= 80: relative error below 1e-7 + 1.4e-8·|x|, which is less than
/// what rounding x itself to f32 costs (6e-8·|x|). e^0 is exactly 1, results below 1.2e-38 are
/// exactly 0, NaN stays NaN.
///
/// e^x = 2^n · 2^r with n = round(x / ln 2) and |r| <= 1/2; 2^r is the minimax polynomial of degree
/// 6 (relative error 2e-9). Thirteen instructions, half of hwy/contrib's Exp, which softmax over
/// narrow heads notices.
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

/// The same for any x <= 80, -inf included.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V exp_f32(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  return exp_f32_in_range(d,
                          hn::Max(hn::Set(d, least_exponent), x));  // this order lets NaN through
}

}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
