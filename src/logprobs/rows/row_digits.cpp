#include "logprobs/rows/row_digits.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "logprobs/rows/row_digits.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "core/error.hpp"
#include "logprobs/rows/row_lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {

using U = hn::RebindToUnsigned<F>;
constexpr int64_t max_lanes = HWY_MAX_BYTES / sizeof(float);

/// Bucket of each value of a vector: an index below digit_sums.
template <class T>
HWY_INLINE hn::Vec<U> buckets_of(F f, V v, const MassScan& scan) {
  const U u;
  const hn::RebindToSigned<F> i;
  const auto bits = hn::BitCast(u, hn::Add(v, hn::Zero(f)));
  const auto sign = hn::BitCast(u, hn::ShiftRight<31>(hn::BitCast(i, bits)));
  auto key = hn::Xor(bits, hn::Or(sign, hn::Set(u, 0x80000000U)));
  if (sizeof(T) == 2) key = hn::ShiftRight<16>(key);
  const auto low = hn::Set(u, scan.low);
  const auto bucket = hn::Min(hn::ShiftRightSame(hn::Sub(key, low), scan.shift),
                              hn::Set(u, static_cast<uint32_t>(digit_buckets)));
  return hn::IfThenElse(hn::Lt(key, low), hn::Set(u, static_cast<uint32_t>(digit_buckets + 1)),
                        bucket);
}

/// Tables used in turn: neighbours often share a bucket, and additions to one sum are serial.
constexpr size_t tables = 4;

template <class T>
HWY_INLINE void add_vector(V v, const MassScan& scan, float unit, int64_t* masses) {
  const F f;
  const U u;
  const auto bucket = buckets_of<T>(f, v, scan);
  const auto last = hn::Set(u, static_cast<uint32_t>(digit_buckets - 1));
  if (!scan.all && hn::AllTrue(u, hn::Gt(bucket, last))) return;
  const V x = hn::Mul(hn::Sub(v, hn::Set(f, scan.max)), hn::Set(f, scan.scale));
  HWY_ALIGN float mass[max_lanes];
  HWY_ALIGN uint32_t at[max_lanes];
  hn::Store(hn::Mul(exp_f32(f, x), hn::Set(f, unit)), f, mass);
  hn::Store(bucket, u, at);
  for (size_t k = 0; k < hn::Lanes(f); ++k)
    masses[k % tables * digit_sums + at[k]] += static_cast<int64_t>(mass[k]);
}

template <class T>
HWY_INLINE void add_row(const T* row, int64_t columns, T nothing, const MassScan& scan,
                        int64_t* sums) {
  const F f;
  const int64_t n = hn::Lanes(f);
  int64_t masses[tables * digit_sums] = {};
  const auto unit = static_cast<float>(int64_t{1} << scan.fraction_bits);
  int64_t c = 0;
  for (; c + n <= columns; c += n) add_vector<T>(load(f, row + c), scan, unit, masses);
  if (c < columns) {
    // Uses the same arithmetic as above: a vector padded with values of mass 0.
    HWY_ALIGN T tail[max_lanes];
    std::fill(std::copy(row + c, row + columns, tail), tail + n, nothing);
    add_vector<T>(load(f, tail), scan, unit, masses);
  }
  for (size_t i = 0; i < tables * digit_sums; ++i) sums[i % digit_sums] += masses[i];
}

template <class T>
HWY_INLINE void count_row(const T* row, int64_t begin, int64_t end, float value, int64_t* above,
                          int64_t* equal) {
  const F f;
  const int64_t n = hn::Lanes(f);
  const V limit = hn::Set(f, value);
  int64_t c = begin;
  for (; c + n <= end; c += n) {
    const V v = load(f, row + c);
    *above += hn::CountTrue(f, hn::Gt(v, limit));
    *equal += hn::CountTrue(f, hn::Eq(v, limit));
  }
  for (; c < end; ++c) {
    *above += to_float(row[c]) > value ? 1 : 0;
    *equal += to_float(row[c]) == value ? 1 : 0;
  }
}

void masses_f32(const float* row, int64_t columns, const MassScan& scan, int64_t* masses) {
  add_row(row, columns, -std::numeric_limits<float>::infinity(), scan, masses);
}
void masses_bf16(const bf16* row, int64_t columns, const MassScan& scan, int64_t* masses) {
  add_row(row, columns, bf16{0xff80}, scan, masses);
}
void count_f32(const float* row, int64_t begin, int64_t end, float value, int64_t* above,
               int64_t* equal) {
  count_row(row, begin, end, value, above, equal);
}
void count_bf16(const bf16* row, int64_t begin, int64_t end, float value, int64_t* above,
                int64_t* equal) {
  count_row(row, begin, end, value, above, equal);
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
namespace {
HWY_EXPORT(masses_f32);
HWY_EXPORT(masses_bf16);
HWY_EXPORT(count_f32);
HWY_EXPORT(count_bf16);
constexpr uint32_t sign_bit = 0x80000000U;
}  // namespace

uint32_t key_of(float value, DType type) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0F);
  const uint32_t key = (bits & sign_bit) != 0 ? ~bits : bits | sign_bit;
  return type == DType::bf16 ? key >> 16 : key;
}

float value_of_key(uint32_t key, DType type) {
  if (type == DType::bf16) key = (key << 16) | ((key & 0x8000U) != 0 ? 0 : 0xffffU);
  return std::bit_cast<float>((key & sign_bit) != 0 ? key ^ sign_bit : ~key);
}

int fraction_bits_for(int64_t columns) {
  return 62 - std::bit_width(static_cast<uint64_t>(columns));
}

void add_masses(ConstMatrixRef logits, int64_t row, int64_t columns, const MassScan& scan,
                int64_t* masses) {
  if (logits.type == DType::f32)
    HWY_DYNAMIC_DISPATCH(masses_f32)(logits.as<float>().row(row), columns, scan, masses);
  else
    HWY_DYNAMIC_DISPATCH(masses_bf16)(logits.as<bf16>().row(row), columns, scan, masses);
}

ColumnCounts count_columns(ConstMatrixRef logits, int64_t row, int64_t begin, int64_t end,
                           float value) {
  ColumnCounts counts;
  if (logits.type == DType::f32) HWY_DYNAMIC_DISPATCH(count_f32)
  (logits.as<float>().row(row), begin, end, value, &counts.above, &counts.equal);
  else HWY_DYNAMIC_DISPATCH(count_bf16)(logits.as<bf16>().row(row), begin, end, value,
                                        &counts.above, &counts.equal);
  return counts;
}

int64_t nth_last_equal(ConstMatrixRef logits, int64_t row, int64_t columns, float value,
                       int64_t n) {
  constexpr int64_t block = 1024;
  for (int64_t end = columns; end > 0;) {
    const int64_t begin = std::max<int64_t>(0, end - block);
    const int64_t found = count_columns(logits, row, begin, end, value).equal;
    if (found < n) {
      n -= found;
      end = begin;
      continue;
    }
    for (int64_t c = end - 1;; --c)
      if (logits.at(row, c) == value && --n == 0) return c;
  }
  GYRE_CHECK(false, "{} more elements of row {} are {}", n, row, value);
  return columns;
}

}  // namespace gyre
#endif  // HWY_ONCE
