// Vector exponential for f32, compiled once per Highway target. Include after hwy/highway.h, inside a
// file that Highway includes once per target (hence no #pragma once).

#if defined(GYRE_RUNTIME_EXP_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_RUNTIME_EXP_INL_HPP_
#undef GYRE_RUNTIME_EXP_INL_HPP_
#else
#define GYRE_RUNTIME_EXP_INL_HPP_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {

/// e^x for x <= 80, relative error below 1e-7; e^0 is exactly 1. Below -87.7 (subnormal results), and for
/// x = -inf, exactly 0; NaN stays NaN. About two thirds of the instructions of hwy/contrib's Exp, which softmax over
/// narrow heads notices.
///
/// e^x = 2^n · e^r with n = round(x / ln 2) and |r| <= ln 2 / 2; e^r is the minimax polynomial of degree 6
/// (relative error 2e-9). ln 2 is split in two so that n · ln 2 is exact enough without FMA, too.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V exp_f32(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  // Adding 1.5 · 2^23 rounds to an integer in the low bits; 127 more make it the biased exponent.
  const V magic = hn::Set(d, 12582912.0F + 127.0F);
  x = hn::Max(hn::Set(d, -88.0F), x);  // the order of arguments lets NaN through on x86
  const V biased = hn::MulAdd(x, hn::Set(d, 1.44269504088896341F), magic);
  const V n = hn::Sub(biased, magic);
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375F), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4F), r);
  V p = hn::Set(d, 0.0013836845755577087F);
  p = hn::MulAdd(p, r, hn::Set(d, 0.008374815806746483F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.04166822507977486F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.16666419804096222F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.49999991059303284F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  const hn::RebindToSigned<D> di;
  const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, biased)));  // 0 for n = -127
  return hn::Mul(p, power);
}

}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
