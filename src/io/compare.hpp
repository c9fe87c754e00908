#pragma once
// Compares two HDF5 files, tensor by tensor. Serial: one process reads both, in blocks.

#include <cstdint>
#include <string>
#include <vector>

namespace gyre {

struct CompareOptions {
  /// Reals agree when |a - b| <= atol + rtol·|b|; a pair with a real does, too. Integers, booleans
  /// and texts agree when they are equal. Nothing is rounded before it is compared.
  double rtol = 1e-5;
  double atol = 1e-5;
  /// NaN agrees with NaN, instead of with nothing.
  bool equal_nan = false;
  /// Of ids NAME_ids [rows, entries] that stand beside values NAME_values, descending, those of
  /// equal values may stand in any order; those of the last value in a row may be any.
  bool any_of_ties = false;
  /// Skip tensors that only one file has, instead of counting them as differences.
  bool common_only = false;
};

/// wide: the tolerance of reals is larger than the values, rtol above 1, or atol above 1 and above
/// the mean of |b|.
enum class Match { same, differs, wide, only_in_a, only_in_b, other_shape, other_kind };

/// Result of comparing one tensor.
struct TensorComparison {
  std::string path;  ///< relative to the compared groups
  std::string shape_a, shape_b;
  int64_t elements = 0;
  int64_t outside = 0;      ///< elements beyond their tolerance
  double max_error = 0;     ///< largest |a - b|; infinite when it is undefined
  double err_over_tol = 0;  ///< largest error as a share of its tolerance
  std::string worst_index;  ///< where err_over_tol is largest; "" where everything is equal
  std::string worst_a, worst_b;
  std::string hint;  ///< what a factor suggests that all values of the two have in common, or ""
  Match match = Match::same;
};

/// "same", "differs", "only in A", ...
std::string describe(const TensorComparison& comparison);

/// Compares all tensors in and below a group of two files. `a` and `b` are "FILE.h5" (the
/// whole file) or "FILE.h5:/group". Attributes are not compared. Texts agree with texts only. Links
/// inside a file are followed. A file that cannot be read, a link to nothing or to another file, a
/// missing group or nothing to compare is a usage error.
std::vector<TensorComparison> compare_files(const std::string& a, const std::string& b,
                                            const CompareOptions& options);

}  // namespace gyre
