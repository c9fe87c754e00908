#include "core/sparse_matrix.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace gyre {
namespace {

std::string fault_of_offsets(const SparseMatrixRef& m, int64_t rows, std::string_view name) {
  const auto entries = static_cast<int64_t>(m.columns.size());
  if (m.rows() != rows)
    return fmt::format("{}offsets has {} elements; it must have {}, one more than the rows", name,
                       m.offsets.size(), rows + 1);
  if (m.weights.size() != m.columns.size())
    return fmt::format("{0}weights has {1} elements; it must have {2}, as {0}columns", name,
                       m.weights.size(), entries);
  if (entries > std::numeric_limits<int32_t>::max())
    return fmt::format("{}columns has {} entries; at most {}", name, entries,
                       std::numeric_limits<int32_t>::max());
  if (m.offsets.front() != 0)
    return fmt::format("{}offsets[0] is {}; it must be 0", name, m.offsets.front());
  for (int64_t r = 0; r < rows; ++r)
    if (m.offsets[r + 1] < m.offsets[r])
      return fmt::format("{}offsets[{}] is {}, below the {} before it; offsets never decrease",
                         name, r + 1, m.offsets[r + 1], m.offsets[r]);
  if (m.offsets.back() != entries)
    return fmt::format(
        "{0}offsets[{1}] is {2}; it must be {3}, the number of elements of {0}columns", name, rows,
        m.offsets.back(), entries);
  return "";
}

/// Two entries of a row in one column.
std::string fault_of_repetition(const SparseMatrixRef& m, int64_t row, std::string_view name) {
  std::vector<std::pair<int32_t, int64_t>> places;
  for (int64_t e = m.offsets[row]; e < m.offsets[row + 1]; ++e)
    places.emplace_back(m.columns[e], e);
  std::ranges::sort(places);
  for (size_t i = 1; i < places.size(); ++i)
    if (places[i].first == places[i - 1].first)
      return fmt::format(
          "{}columns[{}], of row {}, is {}, as entry {} is; give one entry with both weights", name,
          places[i].second, row, places[i].first, places[i - 1].second);
  return "";
}

}  // namespace

std::string fault_of(const SparseMatrixRef& m, int64_t rows, std::string_view name) {
  if (m.width < 1 || m.width > std::numeric_limits<int32_t>::max())
    return fmt::format("{}width is {}; it must be 1 to {}", name, m.width,
                       std::numeric_limits<int32_t>::max());
  if (std::string fault = fault_of_offsets(m, rows, name); !fault.empty()) return fault;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t e = m.offsets[r]; e < m.offsets[r + 1]; ++e) {
      if (m.columns[e] < 0 || m.columns[e] >= m.width)
        return fmt::format("{}columns[{}], of row {}, is {}; columns are 0 to {}", name, e, r,
                           m.columns[e], m.width - 1);
      if (!std::isfinite(m.weights[e]) || m.weights[e] < 0)
        return fmt::format("{}weights[{}], of row {}, is {}; a weight is finite and at least 0",
                           name, e, r, m.weights[e]);
    }
    if (std::string fault = fault_of_repetition(m, r, name); !fault.empty()) return fault;
  }
  return "";
}

}  // namespace gyre
