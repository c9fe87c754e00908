// Merges the softmax over some keys into a partial result, compiled once per Highway target.
// Include after hwy/highway.h and hwy/contrib/math/math-inl.h, inside a file that Highway includes
// once per target (hence no #pragma once).

#if defined(GYRE_ATTENTION_KERNELS_MERGE_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_ATTENTION_KERNELS_MERGE_INL_HPP_
#undef GYRE_ATTENTION_KERNELS_MERGE_INL_HPP_
#else
#define GYRE_ATTENTION_KERNELS_MERGE_INL_HPP_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "runtime/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {

/// For `count` rows, computes the factors of the earlier result and of the new weighted sums, and
/// updates lse. `sum` is Σ exp(score - top); the weighted sums are Σ exp(score - top) · value.
/// `count` is a multiple of the vector's lanes.
template <class D>
HWY_INLINE void merge_factors(D f, const float* top, const float* sum, int64_t count,
                              float* old_factor, float* new_factor, float* lse) {
  namespace hn = hwy::HWY_NAMESPACE;
  using V = hn::Vec<D>;
  const V empty = hn::Set(f, -__builtin_inff()), zero = hn::Zero(f), one = hn::Set(f, 1.0F);
  for (int64_t i = 0; i < count; i += hn::Lanes(f)) {
    const V s = hn::Load(f, sum + i);
    const auto none = hn::Eq(s, zero);
    const V lse1 = hn::Load(f, lse + i);
    const V lse2 = hn::Add(hn::Load(f, top + i), hn::Log(f, hn::IfThenElse(none, one, s)));
    const V larger = hn::Max(lse1, lse2);
    const V reference = hn::IfThenElse(hn::Eq(larger, empty), zero, larger);
    const V a1 = exp_f32(f, hn::Sub(lse1, reference)), a2 = exp_f32(f, hn::Sub(lse2, reference));
    const V total = hn::Add(a1, a2);
    hn::Store(hn::Div(a1, total), f, old_factor + i);
    hn::Store(hn::Div(a2, hn::Mul(total, s)), f, new_factor + i);
    // hn::Log need not handle NaN: the added term keeps a NaN sum NaN.
    hn::Store(hn::Add(hn::Add(larger, hn::Log(f, total)), hn::Sub(s, s)), f, lse + i);
  }
}

}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
