#include "logprobs/row_statistics.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "logprobs/row_statistics.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.hpp"
#include "logprobs/row_lanes-inl.hpp"
#include "runtime/parallel.hpp"

// A row is summed in blocks, against an origin near the largest element seen so far. Each block is
// read once: while its exponentials are summed, integer instructions on the bits, which the
// floating-point pipes hardly notice and which take bf16 by whole registers, find its range. That
// tells three things: whether the sums should have had a higher origin, whether there is a NaN or
// +inf, and whether anything is so low that its exponent should have been clamped (-inf is). If so,
// which is rare, the block is summed again.

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {

/// f32 sums are taken over so many columns.
constexpr int64_t block_columns = 4096;
/// How far ahead of the sums memory is asked for.
constexpr int64_t bytes_ahead = 12288;

/// Sums move to a new origin when a block's maximum has an exponent above this.
constexpr double highest_exponent = 32;

/// The largest element and a lower bound of the smallest: it, if negative, else 0. Neither is set
/// when there is a NaN or +inf.
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
/// The range of pairs of vectors, from their bits as integers: positive numbers order as signed
/// integers do, negative ones backwards, as unsigned integers do.
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
  /// The range of all that was added: `count` elements from z on.
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
  static constexpr int64_t n = static_cast<int64_t>(hn::MaxLanes(Bits()));

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
  static float top_of(Lanes x) {
    const Pair floats = floats_of(x);
    return hn::GetLane(hn::MaxOfLanes(F(), hn::Max(floats.a, floats.b)));
  }
  /// Where all elements are negative the largest has the least bits.
  static Lanes least_bits(const T* z, int64_t count) {
    Lanes least = load(z);
    for (int64_t i = 0; i + n <= count; i += n) least = hn::Min(least, load(z + i));
    return least;
  }

  hn::Vec<Signed> positive_, positive_b_;
  Lanes negative_, negative_b_;
};
#endif

/// The range of any number of elements.
template <class T>
Range range_of(F f, const T* z, int64_t count) {
  const auto n = static_cast<int64_t>(2 * hn::Lanes(f));
  const int64_t pairs = count / n * n;
  Range range = short_range(z + pairs, count - pairs);
  if (pairs == 0) return range;
  RangeLanes<T> lanes(z);
  for (int64_t i = 0; i < pairs; i += n) lanes.add(z + i);
  range.add(lanes.range(z, pairs));
  return range;
}

/// Sums of a row so far: of 2^y, with exponents y counted from the origin, and of (z - reference)
/// 2^y.
struct Sums {
  float scale = 0;  // of the exponents, base 2
  float max = minus_infinity;
  float reference = 0;  // the maximum when the origin was chosen
  Origin origin;
  double sum = 0, weighted = 0;

  bool started() const { return max != minus_infinity; }
  /// Whether elements up to `top` call for another origin.
  bool outgrown(float top) const {
    return top != minus_infinity &&
           (!started() || origin.exponent_of(top, scale) > highest_exponent);
  }
  /// Makes room for elements up to `top`. Returns what sums of 2^y have been multiplied by.
  double raise(float top) {
    const bool first = !started(), enough = !outgrown(top);
    max = std::max(max, top);
    if (enough) return 1;
    const Origin old = origin;
    const double distance = static_cast<double>(reference) - static_cast<double>(top);
    origin = Origin::at(top, scale);
    reference = top;
    const double moved = (static_cast<double>(old.shift) - static_cast<double>(origin.shift)) *
                             static_cast<double>(scale) +
                         static_cast<double>(old.whole) - static_cast<double>(origin.whole);
    const double factor = first ? 0 : std::exp2(moved);
    weighted = factor == 0 ? 0 : (weighted + distance * sum) * factor;
    sum *= factor;
    return factor;
  }
  /// The sum of e^(x - max), at least 1, which is the maximum's own term: no probability is above 1
  /// by rounding. Of that term the error is taken away.
  double sum_to_max(F f) const {
    const Exponential<true> exponential(f, scale, origin);
    const auto parts = exponential.split(f, hn::Set(f, max));
    const V term = hn::Mul(Exp2Polynomial<F>(f)(parts.rest), parts.power);
    const double to_max = exponent_to_max(), own = std::exp2(-to_max);
    return std::max(1.0, (sum + (own - static_cast<double>(hn::GetLane(term)))) / own);
  }
  /// The sum of x e^x with x = (z - max) · natural_scale.
  double weighted_to_max(float natural_scale) const {
    const double distance = static_cast<double>(reference) - static_cast<double>(max);
    return std::min(0.0, static_cast<double>(natural_scale) * (weighted + distance * sum) *
                             std::exp2(exponent_to_max()));
  }
  /// 2 to this power turns sums of 2^y into sums that count from the maximum.
  double exponent_to_max() const { return -origin.exponent_of(max, scale); }
  bool clamp_needed(float low) const {
    return origin.shift != 0 || !HWY_NATIVE_FMA ||
           low * scale < origin.whole + least_exponent_of_2 + 2;
  }
};

/// Sum and weighted sum of a vector's elements.
template <bool weighted>
struct Terms {
  V sum, product;

  /// z as the exponential takes it, and `reference` too.
  HWY_INLINE void add(F f, const Exp2Scale<F>& scale, const Exp2Polynomial<F>& polynomial,
                      V reference, V z) {
    const auto parts = scale.split(f, z);
    const V p = polynomial(parts.rest);
    sum = hn::MulAdd(p, parts.power, sum);
    if constexpr (weighted)
      product = hn::MulAdd(hn::Mul(p, parts.power), hn::Sub(z, reference), product);
  }
};

/// What a block adds to the sums of its row, and its range, which may say that it does not hold.
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
  const auto n = static_cast<int64_t>(2 * hn::Lanes(f));
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
  block.sum = static_cast<double>(hn::GetLane(hn::SumOfLanes(f, hn::Add(a.sum, b.sum))));
  if constexpr (weighted)
    block.weighted =
        static_cast<double>(hn::GetLane(hn::SumOfLanes(f, hn::Add(a.product, b.product))));
  return block;
}

/// Adds a block; false if it has a NaN or +inf. `clamped` says how the last block had to be summed.
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
RowMoments scan_row(const T* z, int64_t count, float scale) {
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

/// Row r of a matrix; the type of elements is looked at here.
void moments_of_row(const ConstMatrixRef& logits, int64_t r, const RowScan& row, RowMoments& out) {
  const auto scan = [&](const auto* z) HWY_ATTR {
    out = row.weighted ? scan_row<true>(z, row.columns, row.scale)
                       : scan_row<false>(z, row.columns, row.scale);
  };
  if (logits.type == DType::f32)
    scan(logits.as<float>().row(r));
  else
    scan(logits.as<bf16>().row(r));
}

/// Sums of one block of a student's and a teacher's row.
struct CrossTerms {
  V student, teacher, cross;
};

/// cross gains e^T (S - reference). A teacher's -inf gives 0, whatever the student has; a student's
/// alone gives -inf, also where e^T is flushed to 0. Where both have the lowest finite number, as
/// masks often do, e^T is 0 and so is the product.
HWY_INLINE void add_cross(F f, V s, V t, V reference, const Exponential<true>& students,
                          const Exponential<true>& teachers, const Exp2Polynomial<F>& polynomial,
                          CrossTerms& sums) {
  const auto q = students.split(f, s), p = teachers.split(f, t);
  sums.student = hn::MulAdd(polynomial(q.rest), q.power, sums.student);
  const V e = hn::Mul(polynomial(p.rest), p.power);
  sums.teacher = hn::Add(sums.teacher, e);
  const V lowest = hn::Set(f, minus_infinity);
  const V below = hn::Max(hn::Set(f, -std::numeric_limits<float>::max()), hn::Sub(s, reference));
  const V product = hn::IfThenElse(hn::Eq(s, lowest), lowest, hn::Mul(e, below));
  sums.cross = hn::Add(sums.cross, hn::IfThenElseZero(hn::Ne(t, lowest), product));
}

/// The sums of a pair of rows so far; `cross` counts from the student's maximum and from the
/// teacher's origin.
struct CrossSums {
  Sums student, teacher;
  double cross = 0;

  void raise(float student_top, float teacher_top) {
    const float old = student.max;
    if (student_top != minus_infinity) student.raise(student_top);
    // While the student has had nothing but -inf, cross is 0 or -inf.
    if (old != minus_infinity && cross != -HUGE_VAL)
      cross += (static_cast<double>(old) - static_cast<double>(student.max)) * teacher.sum;
    if (teacher_top != minus_infinity) {
      const double factor = teacher.raise(teacher_top);
      if (cross != -HUGE_VAL) cross *= factor;
    }
  }
};

template <class S, class T>
void add_cross_block(F f, const S* s, const T* t, int64_t count, CrossSums& sums) {
  constexpr bool evens_first = even_odd<S, T>;
  const Exponential<true> students(f, sums.student.scale, sums.student.origin);
  const Exponential<true> teachers(f, sums.teacher.scale, sums.teacher.origin);
  const Exp2Polynomial<F> polynomial(f);
  const V reference = hn::Set(f, sums.student.max == minus_infinity ? 0.0F : sums.student.max);
  CrossTerms a{hn::Zero(f), hn::Zero(f), hn::Zero(f)}, b = a;
  const auto n = static_cast<int64_t>(2 * hn::Lanes(f));
  const auto add = [&](const Pair& x, const Pair& y) HWY_ATTR {
    add_cross(f, x.a, y.a, reference, students, teachers, polynomial, a);
    add_cross(f, x.b, y.b, reference, students, teachers, polynomial, b);
  };
  int64_t i = 0;
  for (; i + n <= count; i += n) {
    prefetch_pair(f, s + i, bytes_ahead);
    prefetch_pair(f, t + i, bytes_ahead);
    add(load_pair<evens_first>(f, s + i), load_pair<evens_first>(f, t + i));
  }
  if (i < count)
    add(load_part<evens_first>(f, s + i, count - i), load_part<evens_first>(f, t + i, count - i));
  const auto total = [&](V x, V y) HWY_ATTR {
    return static_cast<double>(hn::GetLane(hn::SumOfLanes(f, hn::Add(x, y))));
  };
  sums.student.sum += total(a.student, b.student);
  sums.teacher.sum += total(a.teacher, b.teacher);
  sums.cross += total(a.cross, b.cross);
}

template <class S, class T>
CrossMoments cross_row(const S* s, const T* t, int64_t count) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr int64_t columns = block_columns / 4;  // of both rows twice: in L1
  const F f;
  CrossSums sums;
  sums.student.scale = sums.teacher.scale = log2_e;
  for (int64_t begin = 0; begin < count; begin += columns) {
    const int64_t size = std::min(columns, count - begin);
    const Range student = range_of(f, s + begin, size), teacher = range_of(f, t + begin, size);
    if (!student.regular || !teacher.regular) return {nan, nan, nan, nan, nan};
    sums.raise(student.top, teacher.top);
    add_cross_block(f, s + begin, t + begin, size, sums);
  }
  CrossMoments out{sums.student.max, 0, sums.teacher.max, 0, 0};
  if (sums.student.started()) out.student_sum = static_cast<float>(sums.student.sum_to_max(f));
  if (!sums.teacher.started()) return out;
  out.teacher_sum = static_cast<float>(sums.teacher.sum_to_max(f));
  out.cross =
      static_cast<float>(std::min(0.0, sums.cross * std::exp2(sums.teacher.exponent_to_max())));
  return out;
}

void cross_moments_of_row(const ConstMatrixRef& student, const ConstMatrixRef& teacher, int64_t r,
                          int64_t count, CrossMoments& out) {
  const auto with = [&](const auto* s) HWY_ATTR {
    out = teacher.type == DType::f32 ? cross_row(s, teacher.as<float>().row(r), count)
                                     : cross_row(s, teacher.as<bf16>().row(r), count);
  };
  if (student.type == DType::f32)
    with(student.as<float>().row(r));
  else
    with(student.as<bf16>().row(r));
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
HWY_EXPORT(moments_of_row);
HWY_EXPORT(cross_moments_of_row);

namespace {

/// Calls body(row) for all rows; a column takes about 0.12 ns.
template <class Body>
void for_each_row(int threads, int64_t rows, int64_t columns, Body body) {
  const double nanoseconds = 0.12 * static_cast<double>(columns) + 10;
  for_each_part(threads, rows, nanoseconds, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}

void check_rows(const ConstMatrixRef& matrix, int64_t columns, size_t results) {
  GYRE_CHECK(0 <= columns && columns <= matrix.cols && std::cmp_equal(results, matrix.rows),
             "{} of {} columns, {} rows, {} results", columns, matrix.cols, matrix.rows, results);
}

}  // namespace

void row_moments(ConstMatrixRef logits, const RowScan& scan, std::span<RowMoments> out) {
  check_rows(logits, scan.columns, out.size());
  const auto moments = HWY_DYNAMIC_DISPATCH(moments_of_row);
  for_each_row(scan.threads, logits.rows, scan.columns,
               [&](int64_t r) { moments(logits, r, scan, out[static_cast<size_t>(r)]); });
}

RowMoments merge_moments(const RowMoments& a, const RowMoments& b, float scale) {
  constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
  if (b.max == minus_infinity) return a;
  if (a.max == minus_infinity) return b;
  const float max = std::max(a.max, b.max);
  double sum = 0, weighted = 0;
  for (const RowMoments* part : {&a, &b}) {
    const double d =
        (static_cast<double>(part->max) - static_cast<double>(max)) * static_cast<double>(scale);
    const double factor = std::exp(d);
    sum += static_cast<double>(part->sum) * factor;
    if (factor != 0)
      weighted +=
          (static_cast<double>(part->weighted) + d * static_cast<double>(part->sum)) * factor;
  }
  return {max, static_cast<float>(sum), static_cast<float>(weighted)};
}

void row_cross_moments(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns, int threads,
                       std::span<CrossMoments> out) {
  check_rows(student, columns, out.size());
  check_rows(teacher, columns, out.size());
  const auto moments = HWY_DYNAMIC_DISPATCH(cross_moments_of_row);
  for_each_row(threads, student.rows, columns, [&](int64_t r) {
    moments(student, teacher, r, columns, out[static_cast<size_t>(r)]);
  });
}

}  // namespace gyre
#endif  // HWY_ONCE
