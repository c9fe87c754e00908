#include "logprobs/row_statistics.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "logprobs/row_statistics.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "core/error.hpp"
#include "runtime/exp-inl.hpp"

// A row is read in blocks that fit L1. A block is scanned twice, first for its maximum, then for
// the exponentials, so that the running maximum moves once a block and there is one exp per
// element. What memory delivers is read once: the second scan finds the block in L1 and prefetches
// the next one meanwhile.
//
// NaN or +inf in a row make its `sum` NaN.

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
constexpr float minus_infinity = -__builtin_inff();
constexpr int64_t row_block = 512;

/// Sums of a row so far, one partial sum per vector lane and accumulator.
struct Partial {
  V sum_a, sum_b, weighted_a, weighted_b;
  float max;
};

/// Terms of one vector: exp(x) and x·exp(x) with x = z - max. The clamp selects away what exp
/// flushes to zero, -inf included: there the product is 0, not NaN.
HWY_INLINE void add_terms(F f, V z, V max, V& sum, V& weighted) {
  const V x = hn::Max(hn::Set(f, least_exponent), hn::Sub(z, max));
  const V e = exp_f32_in_range(f, x);
  sum = hn::Add(sum, e);
  weighted = hn::MulAdd(x, e, weighted);
}

/// The `rest` elements from z on, fewer than a vector, filled up with -inf. `before` elements of
/// the row lie in front of z: with a vector's worth of them, one load that ends where the row does
/// is enough.
HWY_INLINE V load_tail(F f, const float* z, int64_t rest, int64_t before) {
  const auto n = static_cast<int64_t>(hn::Lanes(f));
  const V empty = hn::Set(f, minus_infinity);
  if (before + rest >= n) {
    const auto seen = hn::FirstN(f, static_cast<size_t>(n - rest));
    return hn::IfThenElse(seen, empty, hn::LoadU(f, z + rest - n));
  }
  HWY_ALIGN float padded[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(empty, f, padded);
  std::memcpy(padded, z, static_cast<size_t>(rest) * sizeof(float));
  return hn::Load(f, padded);
}

float block_max(F f, const float* z, int64_t count) {
  const auto n = static_cast<int64_t>(hn::Lanes(f));
  V a = hn::Set(f, minus_infinity), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * n <= count; i += 4 * n) {
    a = hn::Max(a, hn::LoadU(f, z + i));
    b = hn::Max(b, hn::LoadU(f, z + i + n));
    c = hn::Max(c, hn::LoadU(f, z + i + 2 * n));
    d = hn::Max(d, hn::LoadU(f, z + i + 3 * n));
  }
  for (; i + n <= count; i += n) a = hn::Max(a, hn::LoadU(f, z + i));
  if (i < count) b = hn::Max(b, load_tail(f, z + i, count - i, i));
  return hn::GetLane(hn::MaxOfLanes(f, hn::Max(hn::Max(a, b), hn::Max(c, d))));
}

/// Moves the partial sums to a new maximum: with d = old - new, sum' = sum·e^d, weighted' =
/// (weighted + d·sum)·e^d.
HWY_INLINE void raise_max(F f, float max, Partial& p) {
  const float old = p.max;
  p.max = max;
  if (old == minus_infinity) return;  // the sums are zero
  const V d =
      hn::Max(hn::Set(f, least_exponent), hn::Set(f, old - max));  // finite where shrink is 0
  const V shrink = exp_f32_in_range(f, d);
  p.weighted_a = hn::Mul(hn::MulAdd(d, p.sum_a, p.weighted_a), shrink);
  p.weighted_b = hn::Mul(hn::MulAdd(d, p.sum_b, p.weighted_b), shrink);
  p.sum_a = hn::Mul(p.sum_a, shrink);
  p.sum_b = hn::Mul(p.sum_b, shrink);
}

void add_block(F f, const float* z, int64_t count, int64_t ahead, Partial& p) {
  const float max = block_max(f, z, count);
  if (!(max <= p.max)) raise_max(f, max, p);
  const V reference = hn::Set(f, p.max == minus_infinity ? 0.0F : p.max);
  const auto n = static_cast<int64_t>(hn::Lanes(f));
  constexpr int64_t line = 16;
  int64_t i = 0, prefetched = 0;
  for (; i + 2 * n <= count; i += 2 * n) {
    for (; prefetched < std::min(i + 2 * n, ahead); prefetched += line)
      hwy::Prefetch(z + row_block + prefetched);
    add_terms(f, hn::LoadU(f, z + i), reference, p.sum_a, p.weighted_a);
    add_terms(f, hn::LoadU(f, z + i + n), reference, p.sum_b, p.weighted_b);
  }
  for (; i + n <= count; i += n)
    add_terms(f, hn::LoadU(f, z + i), reference, p.sum_a, p.weighted_a);
  if (i < count) add_terms(f, load_tail(f, z + i, count - i, i), reference, p.sum_b, p.weighted_b);
}

void scan_row(const float* z, int64_t count, RowStatistics& out) {
  const F f;
  const V zero = hn::Zero(f);
  Partial p{zero, zero, zero, zero, minus_infinity};
  for (int64_t begin = 0; begin < count; begin += row_block) {
    const int64_t size = std::min(row_block, count - begin);
    const int64_t ahead = std::min(row_block, count - begin - size);
    add_block(f, z + begin, size, ahead, p);
  }
  out.max = p.max;
  out.sum = hn::GetLane(hn::SumOfLanes(f, hn::Add(p.sum_a, p.sum_b)));
  out.weighted = hn::GetLane(hn::SumOfLanes(f, hn::Add(p.weighted_a, p.weighted_b)));
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
HWY_EXPORT(scan_row);

void row_statistics(MatrixView<const float> logits, int64_t first_column, int64_t vocab_size,
                    std::span<const int32_t> targets, std::span<RowStatistics> out) {
  GYRE_CHECK(std::ssize(targets) == logits.rows && std::ssize(out) == logits.rows,
             "{} rows, {} targets, {} results", logits.rows, targets.size(), out.size());
  const int64_t valid = std::clamp<int64_t>(vocab_size - first_column, 0, logits.cols);
  const auto scan = HWY_DYNAMIC_DISPATCH(scan_row);
  for (int64_t r = 0; r < logits.rows; ++r) {
    const float* row = logits.row(r);
    const auto at = static_cast<size_t>(r);
    scan(row, valid, out[at]);
    const int64_t column = targets[at] - first_column;
    const bool owned = targets[at] >= 0 && column >= 0 && column < valid;
    out[at].target = owned ? row[column] : 0.0F;
  }
}

}  // namespace gyre
#endif  // HWY_ONCE
