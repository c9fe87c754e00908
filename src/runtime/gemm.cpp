#include "runtime/gemm.hpp"

#include <libxsmm.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "core/error.hpp"
#include "core/index.hpp"
#include "runtime/buffer.hpp"

// libxsmm is column-major. A row-major matrix is the transpose of the column-major one at the same
// address, so that c = a·b is asked for as cᵀ [n, m] = bᵀ [n, k] · aᵀ [k, m] and nothing is
// transposed.

namespace gyre {
namespace {

// A panel of b (panel_columns x depth floats, at most 64 KiB) is copied so that its rows lie next
// to each other: with the caller's stride, often a power of two, it would fall on a few cache sets
// only.
constexpr int64_t panel_columns = 64;
constexpr int64_t largest_depth = 256;
constexpr int64_t row_block = 64;

struct Strides {
  int64_t a, b, c;
};

/// The generated kernels of one call. A call has at most two sizes in each direction (block and
/// rest), with and without accumulation; libxsmm keeps what it generated for later calls, by shape.
class Kernels {
 public:
  explicit Kernels(Strides strides) : strides_(strides) {}

  libxsmm_smmfunction get(int64_t rows, int64_t columns, int64_t depth, bool accumulate) {
    for (int i = 0; i < used_; ++i) {
      const Entry& e = entries_[static_cast<size_t>(i)];
      if (e.rows == rows && e.columns == columns && e.depth == depth && e.accumulate == accumulate)
        return e.kernel;
    }
    const Entry made{rows, columns, depth, accumulate, generate(rows, columns, depth, accumulate)};
    entries_[static_cast<size_t>(used_++)] = made;
    return made.kernel;
  }

 private:
  struct Entry {
    int64_t rows, columns, depth;
    bool accumulate;
    libxsmm_smmfunction kernel;
  };

  libxsmm_smmfunction generate(int64_t rows, int64_t columns, int64_t depth,
                               bool accumulate) const {
    const auto narrow = [](int64_t x) { return static_cast<libxsmm_blasint>(x); };
    const libxsmm_blasint lda = narrow(strides_.b), ldb = narrow(strides_.a),
                          ldc = narrow(strides_.c);
    const float alpha = 1, beta = accumulate ? 1.0F : 0.0F;
    const int flags = LIBXSMM_GEMM_FLAG_NONE, prefetch = LIBXSMM_PREFETCH_NONE;
    const libxsmm_smmfunction kernel =
        libxsmm_smmdispatch(narrow(columns), narrow(rows), narrow(depth), &lda, &ldb, &ldc, &alpha,
                            &beta, &flags, &prefetch);
    if (kernel == nullptr)
      throw_runtime("libxsmm has no f32 kernel for {} x {} x {} on this processor", rows, depth,
                    columns);
    return kernel;
  }

  Strides strides_;
  std::array<Entry, 16> entries_;
  int used_ = 0;
};

/// Copies b [depth, columns] to rows of `panel_columns`.
void pack_panel(MatrixView<const float> b, float* panel) {
  const size_t bytes = static_cast<size_t>(b.cols) * sizeof(float);
  for (int64_t i = 0; i < b.rows; ++i) std::memcpy(panel + i * panel_columns, b.row(i), bytes);
}

float* panel_scratch() {
  thread_local Buffer<float> scratch(panel_columns * largest_depth);
  return scratch.data();
}

void check_shapes(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c) {
  GYRE_CHECK(a.cols == b.rows && a.rows == c.rows && b.cols == c.cols,
             "[{}, {}] = [{}, {}] x [{}, {}]", c.rows, c.cols, a.rows, a.cols, b.rows, b.cols);
  constexpr int64_t limit = std::numeric_limits<libxsmm_blasint>::max();
  GYRE_CHECK(std::max({a.stride, b.stride, c.stride}) <= limit, "strides {}, {}, {}", a.stride,
             b.stride, c.stride);
}

}  // namespace

void gemm(MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> c,
          bool accumulate) {
  check_shapes(a, b, c);
  if (c.rows == 0 || c.cols == 0) return;
  if (a.cols == 0) {
    if (!accumulate)
      for (int64_t i = 0; i < c.rows; ++i) std::fill_n(c.row(i), c.cols, 0.0F);
    return;
  }
  const bool pack = a.rows >= row_block;  // otherwise the copy would not be used often enough
  // A stride matters between rows only; libxsmm refuses one below the row's length.
  const auto stride_of = [](auto view) { return view.rows == 1 ? view.cols : view.stride; };
  Kernels kernels({stride_of(a), pack ? panel_columns : stride_of(b), stride_of(c)});
  const int64_t slices = ceil_div(a.cols, largest_depth);
  const int64_t depth = ceil_div(a.cols, slices);
  for (int64_t n = 0; n < c.cols; n += panel_columns) {
    const int64_t columns = std::min(panel_columns, c.cols - n);
    for (int64_t k = 0; k < a.cols; k += depth) {
      const int64_t depth_now = std::min(depth, a.cols - k);
      const float* panel = b.row(k) + n;
      if (pack) {
        pack_panel(b.rows_from(k, depth_now).columns_from(n, columns), panel_scratch());
        panel = panel_scratch();
      }
      for (int64_t m = 0; m < c.rows; m += row_block) {
        const int64_t rows = std::min(row_block, c.rows - m);
        kernels.get(rows, columns, depth_now, accumulate || k > 0)(panel, a.row(m) + k,
                                                                   c.row(m) + n);
      }
    }
  }
}

}  // namespace gyre
