#include "logprobs/rows/row_statistics.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "logprobs/rows/softmax_cross_partials.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "logprobs/rows/row_passes.hpp"
#include "logprobs/rows/row_sums-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {

/// Sums of one block of a student's and a teacher's row.
struct CrossTerms {
  V student, teacher, cross;
};

/// Adds e^t (s - reference) · sum_unit to cross: 0 if the teacher's t is -inf, whatever the
/// student's s is; -inf if only s is, even if e^t underflows to 0. `reference` is in that unit, so
/// that no finite difference overflows.
HWY_INLINE void add_cross(F f, V s, V t, V reference, const Exponential<true>& students,
                          const Exponential<true>& teachers, const Exp2Polynomial<F>& polynomial,
                          CrossTerms& sums) {
  const auto q = students.split(f, s), p = teachers.split(f, t);
  sums.student = hn::MulAdd(polynomial(q.rest), q.power, sums.student);
  const V e = hn::Mul(polynomial(p.rest), p.power);
  sums.teacher = hn::Add(sums.teacher, e);
  const V lowest = hn::Set(f, minus_infinity);
  const V below = hn::MulSub(s, hn::Set(f, sum_unit), reference);
  const V product = hn::IfThenElse(hn::Eq(s, lowest), lowest, hn::Mul(e, below));
  sums.cross = hn::Add(sums.cross, hn::IfThenElseZero(hn::Ne(t, lowest), product));
}

/// Running sums of a pair of rows; `cross`, in units of 1 / sum_unit, is relative to the
/// student's maximum and the teacher's origin.
struct CrossSums {
  Sums student, teacher;
  double cross = 0;

  void raise(float student_top, float teacher_top) {
    const float old = student.max;
    if (student_top != minus_infinity) student.raise(student_top);
    // While all student logits are -inf, cross is 0 or -inf.
    if (old != minus_infinity && cross != -HUGE_VAL)
      cross += (old - static_cast<double>(student.max)) * sum_unit * teacher.sum;
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
  const V reference =
      hn::Set(f, sums.student.max == minus_infinity ? 0.0F : sums.student.max * sum_unit);
  CrossTerms a{hn::Zero(f), hn::Zero(f), hn::Zero(f)}, b = a;
  const int64_t n = 2 * hn::Lanes(f);
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
  const auto total = [&](V x, V y) HWY_ATTR -> double {
    return hn::GetLane(hn::SumOfLanes(f, hn::Add(x, y)));
  };
  sums.student.sum += total(a.student, b.student);
  sums.teacher.sum += total(a.teacher, b.teacher);
  sums.cross += total(a.cross, b.cross);
}

template <class S, class T>
CrossPartial cross_row(const S* s, const T* t, int64_t count) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr int64_t columns = block_columns / 4;  // both rows, read twice, fit in L1
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
  CrossPartial out{sums.student.max, 0, sums.teacher.max, 0, 0};
  if (sums.student.started()) out.student_sum = static_cast<float>(sums.student.sum_to_max(f));
  if (!sums.teacher.started()) return out;
  out.teacher_sum = static_cast<float>(sums.teacher.sum_to_max(f));
  out.cross =
      static_cast<float>(std::min(0.0, sums.cross * std::exp2(sums.teacher.exponent_to_max())));
  return out;
}

void cross_partials_of_row(const ConstMatrixRef& student, const ConstMatrixRef& teacher, int64_t r,
                           int64_t count, CrossPartial& out) {
  with_row(student, r, [&](const auto* s) HWY_ATTR {
    with_row(teacher, r, [&](const auto* t) HWY_ATTR { out = cross_row(s, t, count); });
  });
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
HWY_EXPORT(cross_partials_of_row);

void softmax_cross_partials(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns,
                            int threads, std::span<CrossPartial> out) {
  check_rows(student, columns, out.size());
  check_rows(teacher, columns, out.size());
  const auto partials = HWY_DYNAMIC_DISPATCH(cross_partials_of_row);
  for_each_row(threads, student.rows, columns,
               [&](int64_t r) { partials(student, teacher, r, columns, out[r]); });
}

}  // namespace gyre
#endif  // HWY_ONCE
