#pragma once
// Sparse matrices of non-negative weights, by rows.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gyre {

/// Row r has weights[e] in column columns[e] for e from offsets[r] to offsets[r + 1] - 1, and 0 in
/// other columns.
struct SparseMatrixRef {
  int64_t width = 0;                 ///< number of columns
  std::span<const int64_t> offsets;  ///< [rows + 1]
  std::span<const int32_t> columns;  ///< [entries]
  std::span<const float> weights;    ///< [entries]

  int64_t rows() const { return static_cast<int64_t>(offsets.size()) - 1; }
};

/// A matrix with its arrays.
struct SparseMatrix {
  int64_t width = 0;
  std::vector<int64_t> offsets;
  std::vector<int32_t> columns;
  std::vector<float> weights;

  explicit SparseMatrix(int64_t columns_of_matrix = 0) : width(columns_of_matrix) {}
  explicit SparseMatrix(const SparseMatrixRef& m)
      : width(m.width),
        offsets(m.offsets.begin(), m.offsets.end()),
        columns(m.columns.begin(), m.columns.end()),
        weights(m.weights.begin(), m.weights.end()) {}
  SparseMatrixRef ref() const { return {width, offsets, columns, weights}; }
};

/// Names the first thing that is wrong with a matrix of `rows` rows, with row and entry; empty if
/// nothing is: the offsets divide all entries over the rows, columns are inside the matrix and
/// different in a row, weights are finite and not negative. `name` stands before the names of the
/// arrays: "/logprobs/projection_" for "/logprobs/projection_weights[3]".
std::string fault_of(const SparseMatrixRef& matrix, int64_t rows, std::string_view name);

}  // namespace gyre
