#pragma once
// Arithmetic of the device row passes, per element and per part of a row, also called by host
// tests. row_statistics.hpp, row_gradient.hpp, row_selection.hpp and row_digits.hpp define the
// results. Here, exponentials have base 2.
//
//     a row of 80000 columns     parts [0, 32768), [32768, 65536), [65536, 80000): one block each
//     a thread of a block        every 256th vector of the part: f32 sums of at most 128 columns,
//                                relative to the largest logit that the thread has read
//     a block, a row             f64 sums over threads, and over parts in order, relative to the
//                                largest logit of all
//
// A thread updates the maximum once per vector, so that an element costs one exponential.

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/bf16.hpp"
#include "core/dtype.hpp"
#include "core/host_device.hpp"
#include "logprobs/rows/row_digits.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/rows/row_statistics.hpp"
#ifdef __CUDACC__
#include "runtime/device_code.cuh"
#endif

namespace gyre::rows {

inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
inline constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
inline constexpr double log2_e = 1.44269504088896341;
inline constexpr double ln_2 = 0.693147180559945309;
/// Factor of a logit whose exponential is computed as a power of 2.
GYRE_HOST_DEVICE inline float base_2(float scale) {
  return static_cast<float>(scale * log2_e);
}
/// With y = no_exponent, 2^y and y · 2^y are 0 in f32; with y = -inf, the product would be NaN.
inline constexpr float no_exponent = -200;

GYRE_HOST_DEVICE inline float power_of_2(float x) {
#ifdef __CUDA_ARCH__
  return fast_exp2(x);
#else
  return std::exp2(x);
#endif
}
/// Maximum; if one is NaN, the other.
GYRE_HOST_DEVICE inline float larger(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return a < b || a != a ? b : a;
#endif
}
/// Maximum of x and `least`; NaN if x is NaN.
GYRE_HOST_DEVICE inline float at_least(float x, float least) {
#ifdef __CUDA_ARCH__
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(least));
  return y;
#else
  return x < least ? least : x;
#endif
}

/// Columns per part of a row, equal on all devices: the bits of results depend on it.
inline constexpr int64_t part_columns = 32768;
GYRE_HOST_DEVICE constexpr int64_t parts_of(int64_t columns, int64_t columns_of_part) {
  return (columns + columns_of_part - 1) / columns_of_part;
}

/// Number of elements, of `size` bytes, from the last multiple of `lanes` elements to the address.
GYRE_HOST_DEVICE inline int64_t past_alignment(const void* address, int64_t size, int64_t lanes) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address)) / size % lanes;
}

// ---- partials ----

/// Rescales sums of 2^y and y 2^y with y = (z - max) · scale from maximum `from` to `to`.
template <class T>
GYRE_HOST_DEVICE void move_sums(float from, float to, float scale, T& sum, T& weighted) {
  if (from == to || sum == 0) return;
  const float distance = (from - to) * scale, factor = power_of_2(distance);
  // If factor is 0, distance may be infinite; a NaN in `sum` is kept.
  weighted =
      factor == 0 ? sum * 0 : (weighted + static_cast<T>(distance) * sum) * static_cast<T>(factor);
  sum *= static_cast<T>(factor);
}

/// Sums of a part of a row, relative to its maximum.
struct PartSums {
  float max = minus_infinity;
  double sum = 0, weighted = 0;
  double total = 0;  // of logits · sum_unit

  GYRE_HOST_DEVICE void add(PartSums part, float scale) {
    const float top = larger(max, part.max);
    move_sums(max, top, scale, sum, weighted);
    move_sums(part.max, top, scale, part.sum, part.weighted);
    max = top;
    sum += part.sum;
    weighted += part.weighted;
    total += part.total;
  }
};

/// Sums of the elements that one thread reads. NaN or +inf makes `sum` NaN, but does not affect
/// `max`.
template <bool with_weights>
struct ThreadSums {
  float scale = 1;
  float max = minus_infinity;
  float sum = 0, weighted = 0;
  double total = 0;

  template <int count>
  GYRE_HOST_DEVICE void add(const float (&z)[count]) {
    float top = max;
    for (int i = 0; i < count; ++i) top = larger(top, z[i]);
    if (top > max) {
      move_sums(max, top, scale, sum, weighted);
      max = top;
    }
    const float origin = max == minus_infinity ? 0 : max;
    for (int i = 0; i < count; ++i) {
      float y = (z[i] - origin) * scale;
      if (with_weights) y = at_least(y, no_exponent);  // -inf · 0 is NaN
      const float term = power_of_2(y);
      sum += term;
      if (with_weights) weighted += y * term;
    }
  }
  /// Adds those elements to `total` of which a bit of `valid` is set.
  template <int count>
  GYRE_HOST_DEVICE void add_total(const float (&z)[count], unsigned valid) {
    float terms = 0;
    for (int i = 0; i < count; ++i) terms += (valid >> i & 1U) != 0 ? z[i] * sum_unit : 0;
    total += terms;
  }
  /// Returns the sums in f64, relative to the common maximum `to` of several threads.
  GYRE_HOST_DEVICE PartSums part(float to) const {
    PartSums part{to, sum, weighted, total};
    move_sums(max, to, scale, part.sum, part.weighted);
    return part;
  }
};

/// The maximum's term is 1, so a smaller sum is a rounding error.
GYRE_HOST_DEVICE inline float sum_of(double sum) {
  return sum < 1 ? 1.0F : static_cast<float>(sum);
}

GYRE_HOST_DEVICE inline SoftmaxPartial partials_of(const PartSums& row, bool weighted) {
  const auto total = static_cast<float>(row.total);
  if (row.sum != row.sum) return {nan_value, nan_value, weighted ? nan_value : 0, total};
  if (row.sum == 0) return {minus_infinity, 0, 0, total};
  const double product = row.weighted * ln_2;
  return {row.max, sum_of(row.sum), weighted ? static_cast<float>(product > 0 ? 0 : product) : 0,
          total};
}

/// Partials of a row from its parts, added in order.
GYRE_HOST_DEVICE inline SoftmaxPartial partials_of(const PartSums* row, int64_t parts, float scale,
                                                   bool weighted) {
  PartSums total;
  for (int64_t p = 0; p < parts; ++p) total.add(row[p], scale);
  return partials_of(total, weighted);
}

// ---- cross partials ----

/// Sums of a student's and a teacher's row, or parts of them, relative to the maxima. `cross` is in
/// units of 1 / sum_unit, and f64 even in a thread: a term that a later maximum makes negligible
/// may be large before.
struct CrossSums {
  float student_max = minus_infinity, teacher_max = minus_infinity;
  double student_sum = 0, teacher_sum = 0, cross = 0;

  GYRE_HOST_DEVICE void raise_student(float top) {
    if (top == student_max) return;
    // While all student logits are -inf, cross is 0 or -inf.
    if (student_max != minus_infinity && cross != minus_infinity)
      cross += (student_max - static_cast<double>(top)) * sum_unit * teacher_sum;
    double none = 0;
    move_sums(student_max, top, static_cast<float>(log2_e), student_sum, none);
    student_max = top;
  }
  GYRE_HOST_DEVICE void raise_teacher(float top) {
    if (top == teacher_max) return;
    const float factor = power_of_2((teacher_max - top) * static_cast<float>(log2_e));
    teacher_sum *= factor;
    if (cross != minus_infinity) cross *= factor;
    teacher_max = top;
  }
  GYRE_HOST_DEVICE void raise(float student_top, float teacher_top) {
    raise_student(student_top);
    raise_teacher(teacher_top);
  }
  GYRE_HOST_DEVICE void add(CrossSums part) {
    const float student_top = larger(student_max, part.student_max);
    const float teacher_top = larger(teacher_max, part.teacher_max);
    raise(student_top, teacher_top);
    part.raise(student_top, teacher_top);
    student_sum += part.student_sum;
    teacher_sum += part.teacher_sum;
    cross += part.cross;
  }

  /// Adds elements. Their terms in cross, e^t (s - max) · sum_unit, are 0 if t is -inf, -inf if
  /// only s is.
  template <int count>
  GYRE_HOST_DEVICE void add(const float (&s)[count], const float (&t)[count]) {
    constexpr auto scale = static_cast<float>(log2_e);
    float student_top = student_max, teacher_top = teacher_max;
    for (int i = 0; i < count; ++i) student_top = larger(student_top, s[i]);
    for (int i = 0; i < count; ++i) teacher_top = larger(teacher_top, t[i]);
    raise(student_top, teacher_top);
    const float student_origin = student_top == minus_infinity ? 0 : student_top;
    const float teacher_origin = teacher_top == minus_infinity ? 0 : teacher_top;
    float student_terms = 0, teacher_terms = 0, cross_terms = 0;
    for (int i = 0; i < count; ++i) {
      const float below = s[i] - student_origin;
      student_terms += power_of_2(below * scale);
      const float p = power_of_2((t[i] - teacher_origin) * scale);
      teacher_terms += p;
      // In this unit a difference of finite logits is finite, and its product with p = 0 is 0.
      const float scaled = s[i] * sum_unit - student_origin * sum_unit;
      cross_terms += t[i] == minus_infinity ? 0 : s[i] == minus_infinity ? s[i] : p * scaled;
    }
    student_sum += student_terms;
    teacher_sum += teacher_terms;
    cross += cross_terms;
  }
};

GYRE_HOST_DEVICE inline CrossPartial partials_of(const CrossSums& row) {
  if (row.student_sum != row.student_sum || row.teacher_sum != row.teacher_sum)
    return {nan_value, nan_value, nan_value, nan_value, nan_value};
  CrossPartial out{minus_infinity, 0, minus_infinity, 0, 0};
  if (row.student_sum > 0) {
    out.student_max = row.student_max;
    out.student_sum = sum_of(row.student_sum);
  }
  if (row.teacher_sum > 0) {
    out.teacher_max = row.teacher_max;
    out.teacher_sum = sum_of(row.teacher_sum);
    out.cross = static_cast<float>(row.cross > 0 ? 0 : row.cross);
  }
  return out;
}

// ---- gradients ----

GYRE_HOST_DEVICE inline bool is_finite(float x) {
  return x - x == 0;
}
GYRE_HOST_DEVICE inline bool usable(const RowNormalizer& row) {
  return is_finite(row.max) && is_finite(row.log_sum);
}

/// Values of a row's valid columns.
enum class RowKind : int32_t { zeros, nans, values };

/// `sloped`: a coefficient of the row is not 0; `needed`: a coefficient or a weight is not 0.
GYRE_HOST_DEVICE inline RowKind kind_of(const RowNormalizer& row, bool sloped, bool needed) {
  if (!needed) return RowKind::zeros;
  if (!usable(row)) return RowKind::nans;
  return sloped ? RowKind::values : RowKind::zeros;
}

/// p and log2 p of a row's elements, which must not be NaN.
struct Distribution {
  float max, scale, log2_sum;

  GYRE_HOST_DEVICE Distribution(const RowNormalizer& row, float natural_scale)
      : max(row.max),
        scale(base_2(natural_scale)),
        log2_sum(static_cast<float>(row.log_sum * log2_e)) {}
  /// log2 p; finite where z is -inf.
  GYRE_HOST_DEVICE float exponent(float z) const {
    return larger((z - max) * scale - log2_sum, no_exponent);
  }
  GYRE_HOST_DEVICE float probability(float z) const { return power_of_2(exponent(z)); }
};

/// The function p (a + b log p) + c of a logit.
struct SlopeOf {
  Distribution row;
  float a, b, c;  // b is the factor of log2 p

  GYRE_HOST_DEVICE SlopeOf(const RowNormalizer& normalizer, float scale,
                           const GradientCoefficients& coefficients)
      : row(normalizer, scale),
        a(coefficients.a),
        b(static_cast<float>(coefficients.b * ln_2)),
        c(coefficients.c) {}
  GYRE_HOST_DEVICE float operator()(float z) const {
    const float y = row.exponent(z);
    return power_of_2(y) * (a + b * y) + c;
  }
};

GYRE_HOST_DEVICE inline bool survives(const RowSurvivors& survivors, float z, int64_t column) {
  // Evaluates both conditions, to avoid a branch.
  const bool tied = z == survivors.threshold, kept = column >= survivors.cut;
  return (z > survivors.threshold) | (tied & kept);
}

/// Column of an id in the shard; -1 if it is not there.
GYRE_HOST_DEVICE inline int64_t column_of(int32_t id, int64_t first_column, int64_t columns) {
  const int64_t column = id - first_column;
  return id >= 0 && column >= 0 && column < columns ? column : -1;
}

// ---- selection ----

/// Maps values to integers in the same order; -0 equals +0, and NaN is above all.
GYRE_HOST_DEVICE inline uint32_t order_of(float z) {
  constexpr uint32_t sign = 0x80000000U;
  if (z != z) return ~0U;
  const auto bits = std::bit_cast<uint32_t>(z + 0.0F);
  return (bits & sign) != 0 ? ~bits : bits | sign;
}
GYRE_HOST_DEVICE inline float value_of_order(uint32_t order) {
  constexpr uint32_t sign = 0x80000000U;
  if (order == ~0U) return nan_value;
  return std::bit_cast<float>((order & sign) != 0 ? order ^ sign : ~order);
}

/// A value and its column as one integer, larger if it comes earlier in a list; 0: no entry.
GYRE_HOST_DEVICE inline uint64_t entry_of(float z, int64_t column) {
  return (static_cast<uint64_t>(order_of(z)) << 32) | static_cast<uint64_t>(0x7fffffff - column);
}
GYRE_HOST_DEVICE inline uint32_t order_of_entry(uint64_t entry) {
  return static_cast<uint32_t>(entry >> 32);
}
GYRE_HOST_DEVICE inline int32_t column_of_entry(uint64_t entry) {
  return static_cast<int32_t>(0x7fffffffU - static_cast<uint32_t>(entry & 0xffffffffU));
}

// ---- digits ----

/// The key of key_of() in row_digits.hpp; z must not be NaN.
GYRE_HOST_DEVICE inline uint32_t digit_key(float z, DType type) {
  const uint32_t key = order_of(z);
  return type == DType::bf16 ? key >> 16 : key;
}

/// Index, below digit_sums, of the sum that a column's mass belongs to.
GYRE_HOST_DEVICE inline int64_t bucket_of(float z, DType type, const MassScan& scan) {
  const uint32_t key = digit_key(z, type);
  if (key < scan.low) return digit_buckets + 1;
  const int64_t bucket = (key - scan.low) >> scan.shift;
  return bucket < digit_buckets ? bucket : digit_buckets;
}

/// floor(exp((z - max) · scale) · 2^fraction_bits); equal for equal values on all ranks.
GYRE_HOST_DEVICE inline uint64_t mass_of(float z, const MassScan& scan) {
  const float scale = base_2(scan.scale);
  const float p = power_of_2((z - scan.max) * scale);
  const auto unit = static_cast<float>(uint64_t{1} << scan.fraction_bits);
  return static_cast<uint64_t>(p * unit);
}

}  // namespace gyre::rows
