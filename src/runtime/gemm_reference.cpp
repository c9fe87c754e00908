#include "core/error.hpp"
#include "runtime/gemm.hpp"

namespace gyre {

void gemm_reference(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
                    bool accumulate) {
  GYRE_CHECK(a.cols == b.rows && a.rows == c.rows && b.cols == c.cols,
             "[{}, {}] = [{}, {}] x [{}, {}]", c.rows, c.cols, a.rows, a.cols, b.rows, b.cols);
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t j = 0; j < c.cols; ++j) {
      double sum = accumulate ? static_cast<double>(c(i, j)) : 0.0;
      for (int64_t k = 0; k < a.cols; ++k)
        sum += static_cast<double>(a(i, k)) * static_cast<double>(b(k, j));
      c(i, j) = static_cast<float>(sum);
    }
}

}  // namespace gyre
