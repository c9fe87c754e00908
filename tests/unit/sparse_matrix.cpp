// What is wrong with a sparse matrix is said with row and entry.

#include "core/sparse_matrix.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace gyre {
namespace GYRE_FILE {

/// 3 rows, of 2, 0 and 1 entries, in 4 columns.
struct Draft {
  int64_t width = 4;
  std::vector<int64_t> offsets{0, 2, 2, 3};
  std::vector<int32_t> columns{0, 3, 0};
  std::vector<float> weights{1, 0, 0.5F};
};

std::string fault(const Draft& d) {
  return fault_of({d.width, d.offsets, d.columns, d.weights}, 3, "m_");
}

TEST(SparseMatrix, HasNoFaultWithEmptyRowsAndWeightsOfZero) {
  EXPECT_EQ(fault({}), "");
  EXPECT_EQ(fault({.offsets = {0, 0, 0, 0}, .columns = {}, .weights = {}}), "");
}

TEST(SparseMatrix, FaultsNameRowAndEntry) {
  EXPECT_EQ(fault({.width = 0}), "m_width is 0; it must be 1 to 2147483647");
  EXPECT_EQ(fault({.offsets = {0, 3}}),
            "m_offsets has 2 elements; it must have 4, one more than the rows");
  EXPECT_EQ(fault({.weights = {1}}), "m_weights has 1 elements; it must have 3, as m_columns");
  EXPECT_EQ(fault({.offsets = {1, 2, 2, 3}}), "m_offsets[0] is 1; it must be 0");
  EXPECT_EQ(fault({.offsets = {0, 2, 1, 3}}),
            "m_offsets[2] is 1, below the 2 before it; offsets never decrease");
  EXPECT_EQ(fault({.offsets = {0, 2, 2, 2}}),
            "m_offsets[3] is 2; it must be 3, the number of elements of m_columns");
  EXPECT_EQ(fault({.columns = {0, 4, 0}}), "m_columns[1], of row 0, is 4; columns are 0 to 3");
  EXPECT_EQ(fault({.columns = {0, 3, -1}}), "m_columns[2], of row 2, is -1; columns are 0 to 3");
  EXPECT_EQ(fault({.columns = {3, 3, 0}}),
            "m_columns[1], of row 0, is 3, as entry 0 is; give one entry with both weights");
  EXPECT_EQ(fault({.weights = {1, 0, -0.5F}}),
            "m_weights[2], of row 2, is -0.5; a weight is finite and at least 0");
  EXPECT_EQ(fault({.weights = {1, HUGE_VALF, 0}}),
            "m_weights[1], of row 0, is inf; a weight is finite and at least 0");
  EXPECT_EQ(fault({.weights = {NAN, 0, 0}}),
            "m_weights[0], of row 0, is nan; a weight is finite and at least 0");
}

}  // namespace GYRE_FILE
}  // namespace gyre
