#pragma once
// Verification of a run's results against references.
//
//     Verification checks(tol_scale);
//     Check& logprobs = checks.check("logprobs", tolerance.logprob);
//     for (...)
//       logprobs.add(actual[i], reference[i], [&] { return fmt::format("position {}", i); });
//     checks.merge_over(world);            // every rank gets the worst values of all ranks
//     fmt::print("{}", checks.text());     // VERIFY PASSED 3/3 max_err_over_tol=0.21
//
// Each value is counted once. merge_repeat() joins two checks of the same values (from two runs,
// say). Values that all ranks have in common are added by one rank.
//
// Results are f32. A finite reference beyond f32, such as the log-probability of a lowest logit
// over a small temperature, is infinite in f32: that infinity is right, and so is a finite value
// within the tolerance.

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "core/common_factor.hpp"

namespace gyre {

/// Error of `actual` in units of `scale`. It is infinite if a value or the scale is not finite, or
/// if the values differ at a scale of 0. A reference may be infinite only where the operation's
/// definition says so: `defined` is its value there.
inline double error_between(double actual, double reference, double scale = 1, double defined = 0) {
  const bool is_legal = std::isfinite(reference) || reference == defined;
  if (actual == reference && is_legal) return 0;
  const double error = std::abs(actual - reference) / scale;
  const bool is_known = std::isfinite(error) && std::isfinite(reference) && std::isfinite(scale);
  return is_known ? error : std::numeric_limits<double>::infinity();
}

/// Whether `actual` is the infinity that f32 makes of a finite reference, which an error of up to
/// `slack` takes beyond the largest f32.
inline bool is_beyond_f32(double actual, double reference, double slack) {
  return std::isinf(actual) && std::isfinite(reference) &&
         std::signbit(actual) == std::signbit(reference) &&
         std::abs(reference) + slack > std::numeric_limits<float>::max();
}

/// Sums over errors and references, both in units of scales. They show what all errors have in
/// common, which may be far below the tolerance of one value.
struct ErrorSums {
  double values = 0, errors = 0, squares = 0, products = 0, references = 0;

  void add(double error, double reference) {
    ++values;
    errors += error;
    squares += error * error;
    products += error * reference;
    references += reference * reference;
  }
  void merge(const ErrorSums& other) {
    values += other.values;
    errors += other.errors;
    squares += other.squares;
    products += other.products;
    references += other.references;
  }
};

/// What a value was compared with.
enum class Against {
  definition,
  answer,             ///< one that the input file has: the user's
  answer_definition,  ///< the value is itself an answer of the file
};

/// A value outside its tolerance.
struct Deviation {
  std::string where;
  double error = std::numeric_limits<double>::infinity();  ///< in units of scale
  double got = 0, expected = 0, scale = 1;
  bool compared = true;  ///< false: there was nothing to compare (a wrong shape, a missing row)
  Against against = Against::definition;
  /// "token 5: got 3, expected 1, error 2, tolerance 0.5", or with an answer "yours 1, Gyre's 3";
  /// `tolerance` in units of scale.
  std::string text(double tolerance) const;
};

/// One kind of comparison: many values, one tolerance. Keeps the worst values.
class Check {
 public:
  /// Number of values outside the tolerance that are kept: the worst ones.
  static constexpr size_t max_deviations = 10;

  /// `sigma`: expected standard deviation of the error of a value, in units of scales. If it is not
  /// 0, the rms of all errors, their mean and their common factor are checked too
  /// (common_error_limits() in tolerance.hpp).
  Check(std::string name, double tolerance, double sigma = 0)
      : name_(std::move(name)), tolerance_(tolerance), sigma_(sigma) {}

  /// Compares one value. `where()` names its place; it is called only when the error is one of the
  /// largest so far. Error and tolerance are relative to `scale` (the rms of the reference's row,
  /// say). `defined`: the reference where it is infinite by definition, see error_between().
  template <class Where>
  void add(double actual, double reference, const Where& where, double scale = 1,
           double defined = 0, Against against = Against::definition) {
    const bool is_infinite = is_beyond_f32(actual, reference, tolerance_ * scale);
    const double error = is_infinite ? 0 : error_between(actual, reference, scale, defined);
    ++count_;
    if (sigma_ > 0 && std::isfinite(error) && std::isfinite(reference) && scale > 0)
      sums_.add(is_infinite ? 0 : (actual - reference) / scale, reference / scale);
    if (std::isfinite(reference) && scale > 0) sizes_ += std::abs(reference) / scale;
    ++values_;
    factor_.add(actual, reference, tolerance_ * scale);
    const bool outside = !(error <= tolerance_);
    if (outside && is_among_worst(error))
      keep({where(), error, actual, reference, scale, true, against});
    outside_ += outside ? 1 : 0;
    if (error > max_error_) {
      max_error_ = error;
      where_ = where();
    }
  }
  /// Counts something that cannot be compared (a wrong shape, a missing row) as infinitely wrong.
  void add_failure(const std::string& where);
  /// Compares arrays element by element. Different lengths are a failure. `name` is the array's.
  template <class T>
  void add_all(const std::vector<T>& actual, const std::vector<T>& expected,
               const std::string& name) {
    if (actual.size() != expected.size())
      return add_failure(
          fmt::format("{}: {} elements, not {}", name, actual.size(), expected.size()));
    for (size_t i = 0; i < actual.size(); ++i)
      add(static_cast<double>(actual[i]), static_cast<double>(expected[i]),
          [&] { return fmt::format("{}[{}]", name, i); });
  }
  /// Lets a check of an input without elements pass: a statement about all its elements is true.
  void add_nothing() { ++count_; }
  /// Counts a value that is NaN by definition, and is NaN: nothing was compared but that.
  void add_undefined() {
    ++count_;
    ++undefined_;
  }
  /// States that values of `tokens` out of `all` tokens were compared. Calls add up. Without a call
  /// all tokens were compared.
  void add_sample(int64_t tokens, int64_t all) {
    sampled_ += tokens;
    sampled_of_ += all;
  }
  /// Adds the counts of `other`, a check of the same name, and keeps the worst values of both.
  void merge(const Check& other);
  /// Replaces this check by `other`, of the same name and values, if that one is worse.
  void merge_repeat(const Check& other);

  const std::string& name() const { return name_; }
  double tolerance() const { return tolerance_; }
  int64_t count() const { return count_; }          ///< values compared
  int64_t outside() const { return outside_; }      ///< those beyond the tolerance
  int64_t undefined() const { return undefined_; }  ///< those that are NaN by definition
  double max_error() const { return max_error_; }
  const std::string& where() const { return where_; }  ///< place of max_error; "" when it is 0
  /// The worst of the values beyond the tolerance, the largest error first.
  const std::vector<Deviation>& deviations() const { return deviations_; }
  int64_t sampled() const { return sampled_; }        ///< tokens whose values were compared
  int64_t sampled_of() const { return sampled_of_; }  ///< out of this number; 0: all were compared
  /// The largest share of a tolerance: max_error over that of one value, or what errors have in
  /// common over its limit. 0 without an error, also at a tolerance of 0.
  double error_over_tolerance() const;
  /// True if something was compared, all of it was within the tolerance, alone and in common, and
  /// the tolerance is not too wide: neither infinite nor above both 1 (the size that errors are
  /// relative to) and the mean size of the references. A wider tolerance would accept results of
  /// zero.
  bool passed() const { return fault().empty(); }
  /// Why the check did not pass; "" if it did.
  std::string fault() const;

 private:
  friend class Verification;
  bool is_too_wide() const;
  /// The share of its limit, and the text, of what errors have in common: the worst of rms, mean
  /// and factor. {0, ""} without a sigma.
  std::pair<double, std::string> common_error() const;
  bool is_among_worst(double error) const {
    return deviations_.size() < max_deviations || error > deviations_.back().error;
  }
  void keep(Deviation deviation);
  /// Throws unless `other` has the same name and tolerance.
  void require_same(const Check& other) const;

  std::string name_;
  double tolerance_, sigma_;
  int64_t count_ = 0;
  int64_t outside_ = 0;
  int64_t undefined_ = 0;
  int64_t sampled_ = 0, sampled_of_ = 0;
  double max_error_ = 0;
  double sizes_ = 0;  // sum of |reference| / scale over values_
  int64_t values_ = 0;
  CommonFactor factor_;
  ErrorSums sums_;
  std::string where_;
  std::vector<Deviation> deviations_;
};

/// All checks of a run. Without any check, the run is unverified: neither passed nor failed.
class Verification {
 public:
  /// Tolerances and sigmas are multiplied by `tolerance_scale`; anything but 1 makes a result
  /// unofficial.
  explicit Verification(double tolerance_scale = 1) : scale_(tolerance_scale) {}

  /// The check `name`, created if new. The reference stays valid. A name has one tolerance.
  Check& check(std::string_view name, double tolerance, double sigma = 0);

  /// Every rank gets the checks of all ranks, in rank order, merged by name. Collective over `comm`
  /// (in host memory).
  void merge_over(Communicator& comm);
  void merge(const Verification& other);
  /// Merges checks of the same values, from a second run: the worse of two checks of a name counts.
  void merge_repeat(const Verification& other);

  bool empty() const { return checks_.empty(); }
  bool passed() const;
  double tolerance_scale() const { return scale_; }
  const std::deque<Check>& checks() const { return checks_; }
  double max_error_over_tolerance() const;

  /// "VERIFY PASSED n/n max_err_over_tol=0.37", followed by ", sampled 64 of 4096 tokens" for the
  /// check that compared the smallest share, and by ", 2 values undefined (NaN)"; or FAILED, and
  /// for each failed check its fault() and a line for each of the `most` worst values outside; or
  /// "VERIFY SKIPPED".
  std::string text(size_t most = 1) const;

 private:
  template <class Merge>
  void merge_each(const Verification& other, Merge merge);
  std::string encode() const;
  void merge_encoded(std::string_view bytes, int rank);

  double scale_;
  std::deque<Check> checks_;  // not a vector: references stay valid
};

}  // namespace gyre
