#include "logprobs/rows/row_statistics.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "logprobs/rows/row_statistics.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "logprobs/rows/row_passes.hpp"
#include "logprobs/rows/row_sums-inl.hpp"

// A row is summed in blocks, relative to an origin near the largest element so far. Each block is
// read once. While its exponentials are summed, integer instructions on the bits find its range;
// they hardly use the floating-point pipes and process a whole register of bf16 at a time. The
// range shows whether the block needs a higher origin, has a NaN or +inf, or has an element so low
// that its exponent must be clamped (as for -inf). If the sums did not account for this, which is
// rare, the block is summed again.

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {

/// Running sums of exponentials and of weighted exponentials, one per lane.
template <bool weighted>
struct Terms {
  V sum, product;

  /// z and `reference` must be in the exponential's form (shifted and clamped).
  HWY_INLINE void add(F f, const Exp2Scale<F>& scale, const Exp2Polynomial<F>& polynomial,
                      V reference, V z) {
    const auto parts = scale.split(f, z);
    const V p = polynomial(parts.rest);
    sum = hn::MulAdd(p, parts.power, sum);
    if constexpr (weighted)
      product = hn::MulAdd(hn::Mul(p, parts.power), hn::Sub(z, reference), product);
  }
};

/// Sums of a block, and its range, which may show that they are invalid.
struct BlockSums {
  Range range;
  double sum = 0, weighted = 0;
};

template <bool weighted, bool clamped, class T>
BlockSums sum_block(F f, const T* z, int64_t count, const Sums& sums) {
  const Exponential<true> exponential(f, sums.scale, sums.origin);
  const Exp2Scale<F>& scale = exponential.scale;
  const Exp2Polynomial<F> polynomial(f);
  const V reference = hn::Set(f, sums.reference - sums.origin.shift);
  const int64_t n = 2 * hn::Lanes(f);
  const int64_t pairs = count / n * n;
  Terms<weighted> a{hn::Zero(f), hn::Zero(f)}, b = a;
  BlockSums block;
  if (pairs > 0) {
    RangeLanes<T> range(z);
    for (int64_t i = 0; i < pairs; i += n) {
      prefetch_pair(f, z + i, bytes_ahead);
      range.add(z + i);
      const Pair x = load_pair<even_odd<T>>(f, z + i);
      if constexpr (clamped) {
        a.add(f, scale, polynomial, reference, exponential.clamp(x.a));
        b.add(f, scale, polynomial, reference, exponential.clamp(x.b));
      } else {
        a.add(f, scale, polynomial, reference, x.a);
        b.add(f, scale, polynomial, reference, x.b);
      }
    }
    block.range = range.range(z, pairs);
  }
  if (pairs < count) {
    block.range.add(short_range(z + pairs, count - pairs));
    const Pair x = load_part<even_odd<T>>(f, z + pairs, count - pairs);
    a.add(f, scale, polynomial, reference, exponential.clamp(x.a));
    b.add(f, scale, polynomial, reference, exponential.clamp(x.b));
  }
  block.sum = hn::GetLane(hn::SumOfLanes(f, hn::Add(a.sum, b.sum)));
  if constexpr (weighted)
    block.weighted = hn::GetLane(hn::SumOfLanes(f, hn::Add(a.product, b.product)));
  return block;
}

/// Adds a block; returns false if it has a NaN or +inf. `clamped`: on entry, whether the last block
/// was clamped, a first guess; on return, whether this one needs it.
template <bool weighted, class T>
bool add_block(F f, const T* z, int64_t count, Sums& sums, bool& clamped) {
  if (!sums.started()) {
    const Range range = range_of(f, z, count);
    if (!range.regular || range.top == minus_infinity) return range.regular;
    sums.raise(range.top);
    clamped = sums.clamp_needed(range.low);
  }
  const auto sum = [&]() HWY_ATTR {
    return clamped ? sum_block<weighted, true>(f, z, count, sums)
                   : sum_block<weighted, false>(f, z, count, sums);
  };
  BlockSums block = sum();
  if (!block.range.regular) return false;
  const bool holds =
      !sums.outgrown(block.range.top) && (clamped || !sums.clamp_needed(block.range.low));
  sums.raise(block.range.top);
  clamped = sums.clamp_needed(block.range.low);
  if (!holds) block = sum();
  sums.sum += block.sum;
  sums.weighted += block.weighted;
  return true;
}

template <bool weighted, class T>
SoftmaxPartial scan_row(const T* z, int64_t count, float scale) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const F f;
  Sums sums;
  sums.scale = scale * log2_e;
  bool clamped = false;
  for (int64_t begin = 0; begin < count; begin += block_columns)
    if (!add_block<weighted>(f, z + begin, std::min(block_columns, count - begin), sums, clamped))
      return {nan, nan, weighted ? nan : 0};
  if (!sums.started()) return {minus_infinity, 0, 0};
  return {sums.max, static_cast<float>(sums.sum_to_max(f)),
          weighted ? static_cast<float>(sums.weighted_to_max(scale)) : 0};
}

/// Sum of values · unit, a power of 2.
template <class T>
double sum_of_block(F f, const T* values, int64_t count, float unit) {
  const int64_t n = 2 * hn::Lanes(f);
  const V factor = hn::Set(f, unit);
  V a = hn::Zero(f), b = a;
  int64_t i = 0;
  for (; i + n <= count; i += n) {
    prefetch_pair(f, values + i, bytes_ahead);
    const Pair x = load_pair<even_odd<T>>(f, values + i);
    a = hn::MulAdd(x.a, factor, a);
    b = hn::MulAdd(x.b, factor, b);
  }
  double sum = hn::GetLane(hn::SumOfLanes(f, hn::Add(a, b)));
  for (; i < count; ++i) sum += to_float(values[i]) * unit;
  return sum;
}

double sum_of_row(const ConstMatrixRef& values, int64_t r, int64_t columns, float unit) {
  double sum = 0;
  with_row(values, r, [&](const auto* from) HWY_ATTR {
    for (int64_t begin = 0; begin < columns; begin += block_columns)
      sum += sum_of_block(F(), from + begin, std::min(block_columns, columns - begin), unit);
  });
  return sum;
}

/// Partials of row r, of either type.
void partials_of_row(const ConstMatrixRef& logits, int64_t r, const RowScan& row,
                     SoftmaxPartial& out) {
  with_row(logits, r, [&](const auto* z) HWY_ATTR {
    out = row.weighted ? scan_row<true>(z, row.columns, row.scale[r])
                       : scan_row<false>(z, row.columns, row.scale[r]);
  });
  if (row.total) out.total = static_cast<float>(sum_of_row(logits, r, row.columns, sum_unit));
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
HWY_EXPORT(partials_of_row);
HWY_EXPORT(sum_of_row);

void softmax_partials(ConstMatrixRef logits, const RowScan& scan, std::span<SoftmaxPartial> out) {
  check_rows(logits, scan.columns, out.size());
  const auto partials = HWY_DYNAMIC_DISPATCH(partials_of_row);
  for_each_row(scan.threads, logits.rows, scan.columns,
               [&](int64_t r) { partials(logits, r, scan, out[r]); });
}

void row_sums(ConstMatrixRef values, int64_t columns, int threads, std::span<double> out) {
  check_rows(values, columns, out.size());
  const auto sum = HWY_DYNAMIC_DISPATCH(sum_of_row);
  for_each_row(threads, values.rows, columns,
               [&](int64_t r) { out[r] = sum(values, r, columns, 1); });
}

}  // namespace gyre
#endif  // HWY_ONCE
