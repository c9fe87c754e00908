#pragma once
// Compares two HDF5 files, tensor by tensor. Serial: one process reads both, in blocks.

#include <cstdint>
#include <string>
#include <vector>

namespace gyre {

struct CompareOptions {
  /// Reals agree when |a - b| <= atol + rtol·|b|, also if only one of a and b is a real. Integers,
  /// booleans and texts agree when they are equal. Nothing is rounded before the comparison.
  double rtol = 1e-5;
  double atol = 1e-5;
  /// NaN agrees with NaN; otherwise NaN agrees with nothing.
  bool equal_nan = false;
  /// If NAME_ids [rows, entries] are the ids of descending NAME_values, ids of equal values agree
  /// in any order, and ids of a row's last value always agree.
  bool any_of_ties = false;
  /// Skip tensors that only one file has, instead of counting them as differences.
  bool common_only = false;
};

/// wide: the tolerance exceeds the values themselves, so that zeros would pass: rtol is at least 1,
/// or atol + rtol · mean is above 1 and above the mean of |b|.
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
  std::string hint;  ///< names a constant factor between the two tensors if there is one, or ""
  Match match = Match::same;
};

/// "same", "differs", "only in A", ...
std::string describe(const TensorComparison& comparison);

/// Compares all tensors in and below a group of two files. `a` and `b` are "FILE.h5" (the whole
/// file) or "FILE.h5:/group". Attributes are not compared. Texts agree only with texts. Links
/// inside a file are followed. An unreadable file, a dangling link, a link to another file, a
/// missing group or nothing to compare is a usage error.
std::vector<TensorComparison> compare_files(const std::string& a, const std::string& b,
                                            const CompareOptions& options);

}  // namespace gyre
