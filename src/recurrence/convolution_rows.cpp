#include "recurrence/convolution_rows.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "recurrence/convolution_rows.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "runtime/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

/// Calls body(tag, first element) for whole vectors of `count` elements, then for single ones.
template <class Body>
HWY_INLINE void for_each_vector(int64_t count, Body body) {
  const hn::ScalableTag<float> wide;
  const hn::CappedTag<float, 1> one;
  const auto lanes = static_cast<int64_t>(hn::Lanes(wide));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(wide, i);
  for (; i < count; ++i) body(one, i);
}

void weighted_sum_lanes(StridedRows taps, StridedRows rows, int64_t width, int64_t count,
                        float* out) {
  for_each_vector(count, [&](auto f, int64_t i) HWY_ATTR {
    auto sum = hn::Zero(f);
    for (int64_t j = 0; j < width; ++j)
      sum = hn::MulAdd(hn::LoadU(f, taps.first + j * taps.stride + i),
                       hn::LoadU(f, rows.first + j * rows.stride + i), sum);
    hn::StoreU(sum, f, out + i);
  });
}

void silu_lanes(const float* z, int64_t count, float* value, float* slope) {
  for_each_vector(count, [&](auto f, int64_t i) HWY_ATTR {
    const auto x = hn::LoadU(f, z + i), one = hn::Set(f, 1.0F);
    // With e = exp(-|x|) nothing overflows: the sigmoid is 1 / (1 + e), or e / (1 + e) below 0.
    const auto e = exp_f32(f, hn::Neg(hn::Abs(x)));
    const auto share = hn::Div(one, hn::Add(one, e));
    const auto below = hn::Lt(x, hn::Zero(f));
    const auto sigmoid = hn::Mul(share, hn::IfThenElse(below, e, one));
    const auto rest = hn::Mul(share, hn::IfThenElse(below, one, e));  // 1 - sigmoid
    const auto product = hn::Mul(x, sigmoid);
    hn::StoreU(product, f, value + i);
    hn::StoreU(hn::MulAdd(product, rest, sigmoid), f, slope + i);
  });
}

void add_products_lanes(const float* a, const float* b, int64_t count, float* sums) {
  for_each_vector(count, [&](auto f, int64_t i) HWY_ATTR {
    hn::StoreU(hn::MulAdd(hn::LoadU(f, a + i), hn::LoadU(f, b + i), hn::LoadU(f, sums + i)), f,
               sums + i);
  });
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
namespace {
HWY_EXPORT(weighted_sum_lanes);
HWY_EXPORT(silu_lanes);
HWY_EXPORT(add_products_lanes);
}  // namespace

void weighted_sum(StridedRows taps, StridedRows rows, int64_t width, int64_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(weighted_sum_lanes)(taps, rows, width, count, out);
}
void silu_row(const float* z, int64_t count, float* value, float* slope) {
  HWY_DYNAMIC_DISPATCH(silu_lanes)(z, count, value, slope);
}
void add_products(const float* a, const float* b, int64_t count, float* sums) {
  HWY_DYNAMIC_DISPATCH(add_products_lanes)(a, b, count, sums);
}

}  // namespace gyre
#endif  // HWY_ONCE
