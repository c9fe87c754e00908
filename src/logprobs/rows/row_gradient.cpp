#include "logprobs/rows/row_gradient.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "logprobs/rows/row_gradient.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.hpp"
#include "logprobs/rows/row_lanes-inl.hpp"
#include "logprobs/rows/row_output.hpp"
#include "logprobs/rows/token_columns.hpp"

// A row's constants are folded into those of the exponential. With an origin near the row's
// normaliser, p = C 2^y for a C between 0.7 and 1.4, and a C 2^y takes as many instructions as 2^y.
// The gradient of an entropy computes log p from z - max, which is exact where p is near 1 and log
// p is small.

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {

/// Constants of a row. log2 p of a column is y + excess, where y is the column's exponent relative
/// to `origin`, and |excess| <= 1/2.
struct Base {
  RowNormalizer row;
  float natural_scale, scale;
  Origin origin;
  double excess;

  Base(const RowNormalizer& row_, float natural_scale_)
      : row(row_), natural_scale(natural_scale_), scale(natural_scale_ * log2_e) {
    const double log2_sum = row.log_sum / std::log(2.0);
    origin = Origin::at(row.max, scale);
    origin.whole += static_cast<float>(std::nearbyint(log2_sum));
    excess = -log2_sum - origin.exponent_of(row.max, scale);
  }
};

/// The function p (a + b log p) + c of a logit; b and c are 0 unless `sloped`.
template <bool shifted, bool sloped>
class Slope {
 public:
  HWY_INLINE Slope(F f, const Base& base, const GradientCoefficients& row_coefficients)
      : exponential_(f, base.scale, base.origin),
        polynomial_(
            f, static_cast<float>(std::exp2(base.excess) * (sloped ? 1.0 : row_coefficients.a))),
        max_(hn::Set(f, base.row.max - base.origin.shift)),
        factor_(hn::Set(f, row_coefficients.b * base.natural_scale)),
        constant_(hn::Set(
            f, static_cast<float>(row_coefficients.a -
                                  row_coefficients.b * static_cast<double>(base.row.log_sum)))),
        added_(hn::Set(f, row_coefficients.c)) {}
  HWY_INLINE V operator()(V z) const {
    const F f;
    z = exponential_.clamp(z);
    const auto parts = exponential_.scale.split(f, z);
    const V p = hn::Mul(polynomial_(parts.rest), parts.power);
    if constexpr (sloped)
      return hn::MulAdd(p, hn::MulAdd(hn::Sub(z, max_), factor_, constant_), added_);
    else
      return p;
  }

 private:
  Exponential<shifted> exponential_;
  Exp2Polynomial<F> polynomial_;
  V max_, factor_, constant_, added_;
};

/// a p for elements above the threshold or, with `ties`, equal to it; else 0.
template <bool ties>
class Survivor {
 public:
  HWY_INLINE Survivor(F f, const Base& base, float a, float threshold)
      : slope_(f, base, {a, 0}), threshold_(hn::Set(f, threshold)) {}
  HWY_INLINE V operator()(V z) const {
    const auto kept = ties ? hn::Ge(z, threshold_) : hn::Gt(z, threshold_);
    return hn::IfThenElseZero(kept, slope_(z));
  }

 private:
  Slope<true, false> slope_;
  V threshold_;
};

/// The function g (q - p) of the student's q and the teacher's p.
class Difference {
 public:
  HWY_INLINE Difference(F f, const Base& student, const Base& teacher, float g)
      : student_(f, student, {g, 0}), teacher_(f, teacher, {g, 0}) {}
  HWY_INLINE V operator()(V s, V t) const { return hn::Sub(student_(s), teacher_(t)); }

 private:
  Slope<true, false> student_, teacher_;
};

/// The function scale (g - p sum) of a logit and its g.
class Centred {
 public:
  HWY_INLINE Centred(F f, const Base& base, float sum)
      : slope_(f, base, {-base.natural_scale * sum, 0}), scale_(hn::Set(f, base.natural_scale)) {}
  HWY_INLINE V operator()(V z, V g) const { return hn::MulAdd(g, scale_, slope_(z)); }

 private:
  Slope<true, false> slope_;
  V scale_;
};

/// The function log p of a logit.
class Logarithm {
 public:
  HWY_INLINE Logarithm(F f, const RowNormalizer& row, float scale)
      : max_(hn::Set(f, row.max)), scale_(hn::Set(f, scale)), log_sum_(hn::Set(f, row.log_sum)) {}
  HWY_INLINE V operator()(V z) const { return hn::MulSub(hn::Sub(z, max_), scale_, log_sum_); }

 private:
  V max_, scale_, log_sum_;
};

// Kernels of one row, which dispatch on the element types.

template <bool sloped, class From, class To>
void slope_row(const Base& base, const GradientCoefficients& row_coefficients, int64_t count,
               bool stream, const From* z, To* to) {
  const F f;
  // With two types, conversions bound the time; the variant without shift would not be faster.
  if constexpr (std::is_same_v<From, To>)
    if (HWY_NATIVE_FMA && base.origin.shift == 0)
      return map_row(f, Slope<false, sloped>(f, base, row_coefficients), count, stream, to, z);
  map_row(f, Slope<true, sloped>(f, base, row_coefficients), count, stream, to, z);
}

void gradient_row(const ConstMatrixRef& logits, int64_t r, const RowPass& pass,
                  const RowNormalizer& row, const GradientCoefficients& row_coefficients,
                  const MatrixRef& out, bool stream) {
  const Base base(row, pass.scale[r]);
  with_row(logits, r, [&](const auto* z) HWY_ATTR {
    with_row(out, r, [&](auto* to) HWY_ATTR {
      if (row_coefficients.b != 0 || row_coefficients.c != 0)
        slope_row<true>(base, row_coefficients, pass.columns, stream, z, to);
      else
        slope_row<false>(base, row_coefficients, pass.columns, stream, z, to);
    });
  });
}

void logarithm_row(const ConstMatrixRef& logits, int64_t r, const RowPass& pass,
                   const RowNormalizer& row, const MatrixRef& out, bool stream) {
  with_row(logits, r, [&](const auto* z) HWY_ATTR {
    with_row(out, r, [&](auto* to) HWY_ATTR {
      map_row(F(), Logarithm(F(), row, pass.scale[r]), pass.columns, stream, to, z);
    });
  });
}

void centred_row(const ConstMatrixRef& logits, const ConstMatrixRef& d_logprobs, int64_t r,
                 const RowPass& pass, const RowNormalizer& row, float sum, const MatrixRef& out,
                 bool stream) {
  const Centred centred(F(), Base(row, pass.scale[r]), sum);
  with_row(logits, r, [&](const auto* z) HWY_ATTR {
    with_row(d_logprobs, r, [&](const auto* g) HWY_ATTR {
      with_row(out, r,
               [&](auto* to) HWY_ATTR { map_row(F(), centred, pass.columns, stream, to, z, g); });
    });
  });
}

void cross_gradient_row(const ConstMatrixRef& student, const ConstMatrixRef& teacher, int64_t r,
                        int64_t count, const RowNormalizer& student_row,
                        const RowNormalizer& teacher_row, float g, const MatrixRef& out,
                        bool stream) {
  const Difference difference(F(), Base(student_row, 1), Base(teacher_row, 1), g);
  with_row(student, r, [&](const auto* s) HWY_ATTR {
    with_row(teacher, r, [&](const auto* t) HWY_ATTR {
      with_row(out, r,
               [&](auto* to) HWY_ATTR { map_row(F(), difference, count, stream, to, s, t); });
    });
  });
}

void filtered_row(const ConstMatrixRef& logits, int64_t r, const RowPass& pass,
                  const RowNormalizer& row, const RowSurvivors& survivors, float a,
                  const MatrixRef& out, bool stream) {
  const F f;
  const Base base(row, pass.scale[r]);
  const int64_t cut = std::clamp<int64_t>(survivors.cut, 0, pass.columns);
  const Survivor<false> above(f, base, a, survivors.threshold);
  const Survivor<true> from_cut(f, base, a, survivors.threshold);
  with_row(logits, r, [&](const auto* z) HWY_ATTR {
    with_row(out, r, [&](auto* to) HWY_ATTR {
      map_row(f, above, cut, stream, to, z);
      map_row(f, from_cut, pass.columns - cut, stream, to + cut, z + cut);
    });
  });
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
HWY_EXPORT(gradient_row);
HWY_EXPORT(logarithm_row);
HWY_EXPORT(centred_row);
HWY_EXPORT(cross_gradient_row);
HWY_EXPORT(filtered_row);

namespace {

bool usable(const RowNormalizer& row) {
  return std::isfinite(row.max) && std::isfinite(row.log_sum);
}

void check(const ConstMatrixRef& from, const MatrixRef& to, int64_t columns, size_t row_values) {
  GYRE_CHECK(from.rows == to.rows && from.cols == to.cols, "{} x {} to {} x {}", from.rows,
             from.cols, to.rows, to.cols);
  GYRE_CHECK(0 <= columns && columns <= to.cols && std::cmp_equal(row_values, to.rows),
             "{} of {} columns, {} values for {} rows", columns, to.cols, row_values, to.rows);
  GYRE_CHECK(from.data != to.data || (from.type == to.type && from.stride == to.stride),
             "in place, but the type or stride differs from the logits'");
}
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// Replaces the logits `values` by p (a + b log p) + c.
void differentiate(std::span<float> values, float scale, const RowNormalizer& row,
                   const GradientCoefficients& row_coefficients) {
  if (values.empty()) return;
  const auto count = std::ssize(values);
  const MatrixView<float> matrix(values.data(), 1, count);
  HWY_DYNAMIC_DISPATCH(gradient_row)
  (ConstMatrixRef(matrix), 0, {count, scale, 1}, row, row_coefficients, matrix, false);
}

}  // namespace

void row_gradient(ConstMatrixRef logits, const RowPass& pass,
                  std::span<const RowNormalizer> normalizers,
                  std::span<const GradientCoefficients> coefficients, const RowTokenIds& token_ids,
                  MatrixRef d_logits) {
  check(logits, d_logits, pass.columns, normalizers.size());
  check_token_ids(token_ids, logits.rows);
  GYRE_CHECK(coefficients.size() == normalizers.size(), "{} coefficients", coefficients.size());
  const RowOutput out = output_at(d_logits, logits);
  const auto gradient = HWY_DYNAMIC_DISPATCH(gradient_row);
  for_each_row_part(pass.threads, logits.rows, logits.cols, [&](int64_t begin, int64_t end) {
    TokenColumns picked(token_ids, pass.columns);
    for (int64_t r = begin; r < end; ++r) {
      const RowNormalizer& row = normalizers[r];
      const GradientCoefficients& row_coefficients = coefficients[r];
      const bool weighted = picked.start(r), sloped = !row_coefficients.is_zero();
      clear(out, r, pass.columns, logits.cols);
      if (!sloped && !weighted) {
        clear(out, r, 0, pass.columns);
      } else if (!usable(row)) {
        fill(out, r, 0, pass.columns, nan_value);
      } else if (!sloped) {
        clear(out, r, 0, pass.columns);
        picked.keep_weights();
        picked.put(d_logits);
      } else {
        if (weighted)
          picked.keep([](int64_t) { return true; },
                      [&](int64_t column) { return logits.at(r, column); });
        differentiate(picked.values(), pass.scale[r], row, row_coefficients);
        gradient(logits, r, pass, row, row_coefficients, out.matrix, out.stream);
        picked.put(d_logits);
      }
    }
  });
}

void row_log_softmax(ConstMatrixRef logits, const RowPass& pass,
                     std::span<const RowNormalizer> normalizers, bool exponentiate, MatrixRef out) {
  check(logits, out, pass.columns, normalizers.size());
  const RowOutput to = output_at(out, logits);
  const auto probability = HWY_DYNAMIC_DISPATCH(gradient_row);
  const auto logarithm = HWY_DYNAMIC_DISPATCH(logarithm_row);
  const float padding = exponentiate ? 0 : -std::numeric_limits<float>::infinity();
  for_each_row_part(pass.threads, logits.rows, logits.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const RowNormalizer& row = normalizers[r];
      fill(to, r, pass.columns, logits.cols, padding);
      if (!usable(row))
        fill(to, r, 0, pass.columns, nan_value);
      else if (exponentiate)
        probability(logits, r, pass, row, {1, 0}, to.matrix, to.stream);
      else
        logarithm(logits, r, pass, row, to.matrix, to.stream);
    }
  });
}

void row_log_softmax_gradient(ConstMatrixRef logits, ConstMatrixRef d_logprobs, const RowPass& pass,
                              std::span<const RowNormalizer> normalizers,
                              std::span<const float> sums, MatrixRef d_logits) {
  check(logits, d_logits, pass.columns, normalizers.size());
  check(d_logprobs, d_logits, pass.columns, sums.size());
  const RowOutput out = output_at(d_logits, logits);
  const auto gradient = HWY_DYNAMIC_DISPATCH(centred_row);
  for_each_row_part(pass.threads, logits.rows, logits.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const size_t at = r;
      clear(out, r, pass.columns, logits.cols);
      if (usable(normalizers[at]))
        gradient(logits, d_logprobs, r, pass, normalizers[at], sums[at], out.matrix, out.stream);
      else
        fill(out, r, 0, pass.columns, nan_value);
    }
  });
}

void row_cross_gradient(ConstMatrixRef student, ConstMatrixRef teacher, const RowPass& pass,
                        std::span<const RowNormalizer> students,
                        std::span<const RowNormalizer> teachers, std::span<const float> gradients,
                        MatrixRef d_student) {
  check(student, d_student, pass.columns, students.size());
  check(teacher, d_student, pass.columns, teachers.size());
  GYRE_CHECK(pass.scale.is_one() && gradients.size() == students.size(),
             "a scale other than 1, or {} gradients", gradients.size());
  const RowOutput out = output_at(d_student, student);
  const auto gradient = HWY_DYNAMIC_DISPATCH(cross_gradient_row);
  for_each_row_part(pass.threads, student.rows, student.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const size_t at = r;
      clear(out, r, pass.columns, student.cols);
      if (gradients[at] == 0)
        clear(out, r, 0, pass.columns);
      else if (!usable(students[at]) || !usable(teachers[at]))
        fill(out, r, 0, pass.columns, nan_value);
      else
        gradient(student, teacher, r, pass.columns, students[at], teachers[at], gradients[at],
                 out.matrix, out.stream);
    }
  });
}

void row_filtered_gradient(ConstMatrixRef logits, const RowPass& pass,
                           std::span<const RowNormalizer> normalizers,
                           std::span<const RowSurvivors> survivors, std::span<const float> a,
                           const RowTokenIds& token_ids, MatrixRef d_logits) {
  check(logits, d_logits, pass.columns, normalizers.size());
  check_token_ids(token_ids, logits.rows);
  GYRE_CHECK(token_ids.per_row == 1 && survivors.size() == normalizers.size() &&
                 a.size() == normalizers.size(),
             "{} token ids a row, {} survivors, {} coefficients", token_ids.per_row,
             survivors.size(), a.size());
  const RowOutput out = output_at(d_logits, logits);
  const auto gradient = HWY_DYNAMIC_DISPATCH(filtered_row);
  for_each_row_part(pass.threads, logits.rows, logits.cols, [&](int64_t begin, int64_t end) {
    TokenColumns picked(token_ids, pass.columns);
    for (int64_t r = begin; r < end; ++r) {
      const size_t at = r;
      const bool weighted = picked.start(r);
      clear(out, r, pass.columns, logits.cols);
      if (a[at] == 0 && !weighted) {
        clear(out, r, 0, pass.columns);
      } else if (!usable(normalizers[at])) {
        fill(out, r, 0, pass.columns, nan_value);
      } else {
        const auto survives = [&](int64_t column) {
          const float z = logits.at(r, column);
          return z > survivors[at].threshold ||
                 (z == survivors[at].threshold && column >= survivors[at].cut);
        };
        if (weighted) picked.keep(survives, [&](int64_t column) { return logits.at(r, column); });
        differentiate(picked.values(), pass.scale[r], normalizers[at], {a[at], 0});
        gradient(logits, r, pass, normalizers[at], survivors[at], a[at], out.matrix, out.stream);
        picked.put(d_logits);
      }
    }
  });
}

}  // namespace gyre
#endif  // HWY_ONCE
