#include "io/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

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

/// Calls visit(first element, slab) for blocks of whole rows of a dataset.
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

ElementError error_of(double a, double b, double atol, double rtol) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return {0, 0};
  const double infinity = std::numeric_limits<double>::infinity();
  if (!std::isfinite(a) || !std::isfinite(b)) return {infinity, infinity};
  const double error = std::abs(a - b), tolerance = atol + rtol * std::abs(b);
  return {error, tolerance > 0 ? error / tolerance : infinity};
}

ElementError error_of(int64_t a, int64_t b) {
  if (a == b) return {0, 0};
  return {std::abs(static_cast<double>(a) - static_cast<double>(b)),
          std::numeric_limits<double>::infinity()};
}

/// Folds the error of element `flat` into the comparison.
template <class T>
void record(TensorComparison& result, const h5::Shape& shape, int64_t flat, ElementError error,
            const T& a, const T& b) {
  result.max_error = std::max(result.max_error, error.absolute);
  if (error.over_tolerance <= result.err_over_tol &&
      !(error.absolute > 0 && result.worst_index.empty()))
    return;
  result.err_over_tol = error.over_tolerance;
  result.worst_index = index_text(flat, shape);
  result.worst_a = fmt::format("{}", a);
  result.worst_b = fmt::format("{}", b);
}

template <class T, class ErrorOf>
void compare_numbers(const h5::Dataset& a, const h5::Dataset& b, const ErrorOf& error_of_pair,
                     TensorComparison& result) {
  for_each_block(a.shape(), [&](int64_t first, const h5::Slab& block) {
    const auto count = static_cast<size_t>(h5::elements_of(block.count));
    std::vector<T> x(count), y(count);
    a.read<T>(std::span(&block, 1), std::span(x));
    b.read<T>(std::span(&block, 1), std::span(y));
    for (size_t i = 0; i < count; ++i)
      record(result, a.shape(), first + static_cast<int64_t>(i), error_of_pair(x[i], y[i]), x[i],
             y[i]);
  });
}

void compare_texts(const h5::Dataset& a, const h5::Dataset& b, TensorComparison& result) {
  const std::vector<std::string> x = a.read_texts(), y = b.read_texts();
  const double infinity = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < x.size(); ++i)
    if (x[i] != y[i])
      record(result, a.shape(), static_cast<int64_t>(i), {infinity, infinity}, x[i], y[i]);
}

void compare_tensors(const h5::Dataset& a, const h5::Dataset& b, const CompareOptions& options,
                     TensorComparison& result) {
  using h5::is_integer, h5::is_real, h5::Type;
  const double infinity = std::numeric_limits<double>::infinity();
  result.shape_a = h5::to_string(a.shape());
  result.shape_b = h5::to_string(b.shape());
  result.elements = a.elements();
  const bool integers = is_integer(a.type()) && is_integer(b.type());
  const bool numbers =
      (is_integer(a.type()) || is_real(a.type())) && (is_integer(b.type()) || is_real(b.type()));
  const bool texts = a.type() == Type::text && b.type() == Type::text;
  const bool same_shape = a.shape() == b.shape();
  if (!same_shape || (!numbers && !texts)) {
    result.match = same_shape ? Match::other_kind : Match::other_shape;
    result.max_error = result.err_over_tol = infinity;
    return;
  }
  if (texts)
    compare_texts(a, b, result);
  else if (integers)
    compare_numbers<int64_t>(
        a, b, [](int64_t x, int64_t y) { return error_of(x, y); }, result);
  else
    compare_numbers<double>(
        a, b, [&](double x, double y) { return error_of(x, y, options.atol, options.rtol); },
        result);
  if (result.err_over_tol > 1) result.match = Match::differs;
}

/// The result for a tensor that the other file lacks: an infinite error.
TensorComparison only_one(const std::string& path, bool in_a) {
  TensorComparison result;
  result.path = path;
  result.match = in_a ? Match::only_in_a : Match::only_in_b;
  result.max_error = result.err_over_tol = std::numeric_limits<double>::infinity();
  return result;
}

}  // namespace

std::string describe(const TensorComparison& comparison) {
  switch (comparison.match) {
    case Match::same:
      return "same";
    case Match::differs:
      return "differs";
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
    if (has_a && has_b)
      compare_tensors(in_a.file.dataset(in_a.group + path), in_b.file.dataset(in_b.group + path),
                      options, result);
    else if (options.common_only)
      continue;
    else
      result = only_one(path, has_a);
    results.push_back(std::move(result));
  }
  if (results.empty()) throw_usage("'{}' and '{}' have no tensor in common", a, b);
  return results;
}

}  // namespace gyre
