#include "row_selection_cases.hpp"

namespace gyre::test::row_kernels {
GYRE_RUN_ON(host, RowSelection);
}  // namespace gyre::test::row_kernels
