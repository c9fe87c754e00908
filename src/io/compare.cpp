#include "io/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <type_traits>

#include "core/common_factor.hpp"
#include "core/error.hpp"
#include "io/h5.hpp"

namespace gyre {
namespace {

constexpr int64_t block_elements = int64_t{1} << 20;

/// A group of an open file.
struct Place {
  h5::File file;
  std::string group;  ///< ends with '/'
  std::set<std::string> tensors;
};

Place open_place(const std::string& text) {
  const size_t colon = text.rfind(":/");
  std::string group = colon == std::string::npos ? "/" : text.substr(colon + 1);
  h5::File file = h5::File::open(text.substr(0, colon));
  if (!file.has_group(group)) throw_usage("'{}' has no group '{}'", file.path(), group);
  const std::vector<std::string> tensors = file.datasets_below(group);
  if (!group.ends_with('/')) group += '/';
  return {std::move(file), std::move(group), {tensors.begin(), tensors.end()}};
}

/// Index of element `flat` in an array of this shape: "[2, 7]", or "[]" for a scalar.
std::string index_text(int64_t flat, const h5::Shape& shape) {
  h5::Shape index(shape.size());
  for (size_t d = shape.size(); d-- > 0; flat /= shape[d]) index[d] = flat % shape[d];
  return h5::to_string(index);
}

/// Calls visit(index of the first element, slab) for blocks of whole rows of a dataset.
template <class Visit>
void for_each_block(const h5::Shape& shape, const Visit& visit) {
  const int64_t total = h5::elements_of(shape);
  if (total == 0) return;
  h5::Slab block{h5::Shape(shape.size(), 0), shape};
  if (shape.empty()) return visit(int64_t{0}, block);
  const int64_t row = total / shape[0], rows = std::max<int64_t>(1, block_elements / row);
  for (int64_t begin = 0; begin < shape[0]; begin += rows) {
    block.start[0] = begin;
    block.count[0] = std::min(rows, shape[0] - begin);
    visit(begin * row, block);
  }
}

/// Error of one element, absolute and as a share of its tolerance.
struct ElementError {
  double absolute;
  double over_tolerance;
};

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Integers and enumerations are compared exactly, whatever the tolerances.
bool is_exact(h5::Type type) {
  return is_integer(type) || type == h5::Type::enumeration;
}
bool is_number(h5::Type type) {
  return is_exact(type) || is_real(type);
}
/// Whether a double represents every value of `type`. A long double does for the other types.
bool fits_double(h5::Type type) {
  return (is_real(type) && type != h5::Type::real) || type == h5::Type::i32;
}

template <class T>
ElementError error_of(T a, T b, bool exact, const CompareOptions& options) {
  if (a == b || (options.equal_nan && std::isnan(a) && std::isnan(b))) return {0, 0};
  if (!std::isfinite(a) || !std::isfinite(b)) return {infinity, infinity};
  const T error = std::abs(a - b);
  const T tolerance = exact ? 0 : options.atol + options.rtol * std::abs(b);
  return {static_cast<double>(error),
          tolerance > 0 ? static_cast<double>(error / tolerance) : infinity};
}

/// The least value that a type rounds to infinity.
double beyond(h5::Type type) {
  if (type == h5::Type::float16) return 65520;
  return type == h5::Type::f32 || type == h5::Type::bfloat16 ? 0x1.ffffffp+127 : infinity;
}
/// What is expected of values of a type: infinity where a value is beyond its range.
template <class T>
T within_range(T expected, h5::Type type) {
  const T limit = beyond(type);
  return std::abs(expected) >= limit ? std::copysign(static_cast<T>(infinity), expected) : expected;
}

/// Folds the error of element `flat` into the comparison; true if it is the worst so far.
bool record(TensorComparison& result, const h5::Shape& shape, int64_t flat, ElementError error) {
  result.max_error = std::max(result.max_error, error.absolute);
  result.outside += error.over_tolerance > 1 ? 1 : 0;
  if (error.over_tolerance <= result.err_over_tol &&
      !(error.absolute > 0 && result.worst_index.empty()))
    return false;
  result.err_over_tol = error.over_tolerance;
  result.worst_index = index_text(flat, shape);
  return true;
}

std::string value_text(long double value, h5::Type type) {
  if (is_exact(type)) return fmt::format("{:.0f}", value);
  if (type == h5::Type::real) return fmt::format("{}", value);
  return fmt::format("{}", static_cast<double>(value));
}

template <class T>
std::vector<T> read_block(const h5::Dataset& dataset, const h5::Slab& block) {
  const int64_t count = h5::elements_of(block.count);
  std::vector<T> values;
  dataset.make_room(count, sizeof(T), [&] { values.resize(count); });
  if constexpr (std::is_same_v<T, double>)
    dataset.read<double>(std::span(&block, 1), values);
  else
    dataset.read_exactly(std::span(&block, 1), values);
  return values;
}

template <class T>
void compare_numbers(const h5::Dataset& a, const h5::Dataset& b, const CompareOptions& options,
                     TensorComparison& result) {
  const bool exact = is_exact(a.type()) && is_exact(b.type());
  CommonFactor factor;
  double size = 0;
  for_each_block(a.shape(), [&](int64_t first, const h5::Slab& block) {
    const std::vector<T> x = read_block<T>(a, block), y = read_block<T>(b, block);
    for (size_t i = 0; i < x.size(); ++i) {
      const T in_range = within_range(y[i], a.type());
      const auto expected = static_cast<double>(in_range);
      factor.add(static_cast<double>(x[i]), expected,
                 exact ? 0 : options.atol + options.rtol * std::abs(expected));
      if (std::isfinite(expected)) size += std::abs(expected);
      const ElementError error = error_of(x[i], in_range, exact, options);
      if (!record(result, a.shape(), first + static_cast<int64_t>(i), error)) continue;
      result.worst_a = value_text(x[i], a.type());
      result.worst_b = value_text(y[i], b.type());
    }
  });
  result.hint = factor.hint();
  if (exact || a.elements() == 0) return;
  const double mean = size / static_cast<double>(a.elements());
  if (options.rtol >= 1 || options.atol + options.rtol * mean > std::max(1.0, mean))
    result.match = Match::wide;  // zeros would pass
}

void compare_texts(const h5::Dataset& a, const h5::Dataset& b, TensorComparison& result) {
  const std::vector<std::string> x = a.read_texts(), y = b.read_texts();
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i] || !record(result, a.shape(), i, {infinity, infinity})) continue;
    result.worst_a = x[i];
    result.worst_b = y[i];
  }
}

void compare_tensors(const h5::Dataset& a, const h5::Dataset& b, const CompareOptions& options,
                     TensorComparison& result) {
  result.shape_a = h5::to_string(a.shape());
  result.shape_b = h5::to_string(b.shape());
  result.elements = a.elements();
  const bool numbers = is_number(a.type()) && is_number(b.type());
  const bool texts = a.type() == h5::Type::text && b.type() == h5::Type::text;
  const bool same_shape = a.shape() == b.shape();
  if (!same_shape || (!numbers && !texts)) {
    result.match = same_shape ? Match::other_kind : Match::other_shape;
    result.max_error = result.err_over_tol = infinity;
    return;
  }
  if (texts)
    compare_texts(a, b, result);
  else if (fits_double(a.type()) && fits_double(b.type()))
    compare_numbers<double>(a, b, options, result);
  else
    compare_numbers<long double>(a, b, options, result);
  if (result.err_over_tol > 1 && result.match != Match::wide) result.match = Match::differs;
}

/// "top_values" for "top_ids"; "" for other names.
std::string values_beside(const std::string& path) {
  const std::string ids = "_ids";
  if (!path.ends_with(ids)) return "";
  return path.substr(0, path.size() - ids.size()) + "_values";
}

/// Ids [rows, entries] of descending values, without the order among equal values: the ids of each
/// run of equal values are sorted, and those of a row's last run, which may be cut off, become -1.
std::vector<double> without_order(std::vector<double> ids, const std::vector<double>& values,
                                  int64_t entries) {
  for (size_t row = 0; row < ids.size(); row += entries) {
    const size_t end = row + static_cast<size_t>(entries);
    for (size_t begin = row, next = row; begin < end; begin = next) {
      ++next;  // also after a NaN, which equals nothing
      while (next < end && values[next] == values[begin]) ++next;
      const auto at = [&](size_t i) { return ids.begin() + static_cast<int64_t>(i); };
      if (next == end)
        std::fill(at(begin), at(end), -1);
      else
        std::sort(at(begin), at(next));
    }
  }
  return ids;
}

/// Compares ids whose order among equal values is free. Returns false unless both files have
/// values, those of A in the shape of the ids.
bool compare_ids(const Place& in_a, const Place& in_b, const std::string& path,
                 TensorComparison& result) {
  const std::string values = values_beside(path);
  if (values.empty() || !in_a.tensors.contains(values) || !in_b.tensors.contains(values))
    return false;
  const auto read = [](const Place& place, const std::string& name) {
    return place.file.dataset(place.group + name);
  };
  const h5::Dataset a = read(in_a, path), b = read(in_b, path), values_a = read(in_a, values);
  if (a.shape().size() != 2 || a.shape() != b.shape() || a.shape() != values_a.shape() ||
      !is_integer(a.type()) || !is_integer(b.type()) || !is_real(values_a.type()))
    return false;
  const std::vector<double> order = values_a.read_all<double>();
  const auto x = without_order(a.read_all<double>(), order, a.shape()[1]),
             y = without_order(b.read_all<double>(), order, a.shape()[1]);
  result.shape_a = result.shape_b = h5::to_string(a.shape());
  result.elements = a.elements();
  for (size_t i = 0; i < x.size(); ++i) {
    const ElementError error = error_of(x[i], y[i], true, {});
    if (!record(result, a.shape(), i, error)) continue;
    result.worst_a = value_text(x[i], a.type());
    result.worst_b = value_text(y[i], b.type());
  }
  if (result.err_over_tol > 1) result.match = Match::differs;
  return true;
}

/// The result for a tensor that the other file lacks: an infinite error.
TensorComparison only_one(const std::string& path, bool in_a) {
  TensorComparison result;
  result.path = path;
  result.match = in_a ? Match::only_in_a : Match::only_in_b;
  result.max_error = result.err_over_tol = infinity;
  return result;
}

}  // namespace

std::string describe(const TensorComparison& comparison) {
  switch (comparison.match) {
    case Match::same:
      return "same";
    case Match::differs:
      return comparison.hint.empty() ? "differs" : comparison.hint;
    case Match::wide:
      return "the tolerance is larger than the values";
    case Match::only_in_a:
      return "only in A";
    case Match::only_in_b:
      return "only in B";
    case Match::other_shape:
      return fmt::format("shapes {} and {}", comparison.shape_a, comparison.shape_b);
    case Match::other_kind:
      return "types that cannot be compared";
  }
  return "?";
}

std::vector<TensorComparison> compare_files(const std::string& a, const std::string& b,
                                            const CompareOptions& options) {
  const Place in_a = open_place(a), in_b = open_place(b);
  std::set<std::string> paths = in_a.tensors;
  paths.insert(in_b.tensors.begin(), in_b.tensors.end());
  std::vector<TensorComparison> results;
  for (const std::string& path : paths) {
    TensorComparison result;
    result.path = path;
    const bool has_a = in_a.tensors.contains(path), has_b = in_b.tensors.contains(path);
    if (has_a && has_b) {
      if (!options.any_of_ties || !compare_ids(in_a, in_b, path, result))
        compare_tensors(in_a.file.dataset(in_a.group + path), in_b.file.dataset(in_b.group + path),
                        options, result);
    } else if (options.common_only) {
      continue;
    } else {
      result = only_one(path, has_a);
    }
    results.push_back(std::move(result));
  }
  if (results.empty()) throw_usage("'{}' and '{}' have no tensor in common", a, b);
  return results;
}

}  // namespace gyre
