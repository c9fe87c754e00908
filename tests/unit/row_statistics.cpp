#include "row_statistics_cases.hpp"

namespace gyre::test::row_kernels {
GYRE_RUN_ON(host, RowStatistics);
}  // namespace gyre::test::row_kernels
