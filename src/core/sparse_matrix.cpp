#include "core/sparse_matrix.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>
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

}  // namespace

std::string fault_of(const SparseMatrixRef& m, int64_t rows, std::string_view name) {
  if (m.width < 1 || m.width > std::numeric_limits<int32_t>::max())
    return fmt::format("{} columns of {}columns; they are 1 to {}", m.width, name,
                       std::numeric_limits<int32_t>::max());
  if (std::string fault = fault_of_offsets(m, rows, name); !fault.empty()) return fault;
  std::vector<int64_t> last(m.width, -1);  // entry that had the column last
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t e = m.offsets[r]; e < m.offsets[r + 1]; ++e) {
      const int32_t column = m.columns[e];
      if (column < 0 || column >= m.width)
        return fmt::format("{}columns[{}], of row {}, is {}; columns are 0 to {}", name, e, r,
                           column, m.width - 1);
      if (last[column] >= m.offsets[r])
        return fmt::format(
            "{}columns[{}], of row {}, is {}, as entry {} is; give one entry with both weights",
            name, e, r, column, last[column]);
      last[column] = e;
      if (!std::isfinite(m.weights[e]) || m.weights[e] < 0)
        return fmt::format("{}weights[{}], of row {}, is {}; a weight is finite and at least 0",
                           name, e, r, m.weights[e]);
    }
  return "";
}

}  // namespace gyre
