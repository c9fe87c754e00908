#include "runtime/gemm.hpp"

#include <libxsmm.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "core/error.hpp"
#include "core/index.hpp"
#include "runtime/buffer.hpp"
#include "runtime/gemm_tiles.hpp"
#include "runtime/xsmm_kernel.hpp"

namespace gyre {
namespace {

// A panel of b (panel_columns x depth floats) is packed into contiguous rows, because the caller's
// stride, often a power of two, would map it to a few cache sets. Packing also widens bf16 and
// transposes a transposed b. libxsmm reads the elements of a one at a time, so a transposed a needs
// no copy.
//
// Loops, outermost first: depth, groups of panels, blocks of rows, panels of the group, slices of
// their depth. A group stays in the L2 cache for all blocks of rows, so a is read from memory once
// per group instead of once per panel.
//
// On processors with multiply_tiles, products of 64 rows or more use it instead of libxsmm, on
// packed blocks of a. Its slices of panels stay in the L1 cache for all rows of a block. Both give
// the same bits, except where libxsmm splits the sums of a small remainder.

/// Largest depth of panels, depth of their slices, columns of a panel, and rows of a block; share
/// of the L2 cache that a group of panels takes.
struct Blocking {
  int64_t depth, slice, columns, rows;
  double share;
};
constexpr Blocking usual_blocking{
    .depth = 256, .slice = 256, .columns = gemm_panel_columns, .rows = 64, .share = 0.5};
constexpr Blocking tile_blocking{
    .depth = 1024, .slice = tile_depth, .columns = tile_columns, .rows = 96, .share = 1};
static_assert(gemm_panel_columns % tile_columns == 0);
/// Distance between packed rows of a. The padding spreads them over the sets of the L1 cache.
constexpr int64_t packed_a_stride = tile_blocking.depth + 16;

/// Size of the parts when `whole` is cut into the fewest parts of at most `most`, all of about
/// equal size and multiples of `unit`.
int64_t even_part(int64_t whole, int64_t most, int64_t unit = 1) {
  const int64_t parts = ceil_div(whole, std::max(unit, most / unit * unit));
  return ceil_div(ceil_div(whole, parts), unit) * unit;
}

/// Number of columns of a group of panels of this depth. Results do not depend on it.
int64_t columns_of_group(int64_t columns, int64_t depth, const Blocking& blocking) {
  static const int64_t l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
  const double bytes = blocking.share * static_cast<double>(l2 > 0 ? l2 : int64_t{1} << 20);
  return even_part(columns, static_cast<int64_t>(bytes) / (depth * sizeof(float)),
                   blocking.columns);
}

struct Strides {
  int64_t a, b, c;
};

/// Generated kernels of one call. A call has at most two sizes in each dimension (block and
/// remainder), with and without accumulation; libxsmm caches generated kernels by shape.
class Kernels {
 public:
  Kernels(Strides strides, bool a_transposed) : strides_(strides), a_transposed_(a_transposed) {}

  libxsmm_smmfunction get(int64_t rows, int64_t columns, int64_t depth, bool accumulate) {
    for (int i = 0; i < used_; ++i) {
      const Entry& e = entries_[i];
      if (e.rows == rows && e.columns == columns && e.depth == depth && e.accumulate == accumulate)
        return e.kernel;
    }
    const Entry made{rows, columns, depth, accumulate,
                     xsmm_kernel({rows, columns, depth, strides_.a, strides_.b, strides_.c,
                                  a_transposed_, accumulate})};
    entries_[used_++] = made;
    return made.kernel;
  }

 private:
  struct Entry {
    int64_t rows, columns, depth;
    bool accumulate;
    libxsmm_smmfunction kernel;
  };

  Strides strides_;
  bool a_transposed_;
  std::array<Entry, 16> entries_;
  int used_ = 0;
};

/// Operands of one product as laid out in memory.
struct Operands {
  MatrixView<const float> a;  // [m, k], or [k, m] when transposed
  ConstMatrixRef b;           // [k, n], or [n, k] when transposed
  bool a_transposed, b_transposed;
  int64_t m() const { return a_transposed ? a.cols : a.rows; }
  int64_t k() const { return a_transposed ? a.rows : a.cols; }
  int64_t b_depth() const { return b_transposed ? b.cols : b.rows; }
  int64_t n() const { return b_transposed ? b.rows : b.cols; }
  const float* a_from(int64_t row, int64_t depth) const {
    return a_transposed ? a.row(depth) + row : a.row(row) + depth;
  }
};

/// Copies `rows` rows of `cols` elements of `from` as f32; rows of `to` are `stride` apart.
void widen(ConstMatrixRef from, int64_t row, int64_t col, int64_t rows, int64_t cols, float* to,
           int64_t stride) {
  if (from.type == DType::f32) {
    const MatrixView<const float> view = from.as<float>();
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(to + i * stride, view.row(row + i) + col,
                  static_cast<size_t>(cols) * sizeof(float));
    return;
  }
  const MatrixView<const bf16> view = from.as<bf16>();
  for (int64_t i = 0; i < rows; ++i) {
    const bf16* source = view.row(row + i) + col;
    for (int64_t j = 0; j < cols; ++j) to[i * stride + j] = to_float(source[j]);
  }
}

struct Scratch {
  Buffer<float> panels, b_rows{gemm_panel_columns * tile_blocking.depth};
  Buffer<float> a_rows{tile_blocking.rows * packed_a_stride};
};
Scratch& scratch() {
  thread_local Scratch scratch;
  return scratch;
}

/// Packs the panel of b at depth k and column n as [depth, columns], in rows of `stride`.
void pack_panel(const Operands& x, int64_t k, int64_t depth, int64_t n, int64_t columns,
                int64_t stride, float* panel) {
  if (!x.b_transposed) return widen(x.b, k, n, depth, columns, panel, stride);
  const float* rows = scratch().b_rows.data();
  int64_t rows_stride = depth;
  if (x.b.type == DType::f32) {
    rows = x.b.as<float>().row(n) + k;
    rows_stride = std::max(x.b.stride, depth);  // a single row may have any stride
  } else {
    widen(x.b, n, k, columns, depth, scratch().b_rows.data(), depth);
  }
  libxsmm_otrans(panel, rows, sizeof(float), static_cast<libxsmm_blasint>(depth),
                 static_cast<libxsmm_blasint>(columns), static_cast<libxsmm_blasint>(rows_stride),
                 static_cast<libxsmm_blasint>(stride));
}

/// Packs panels of `width` columns of the columns [begin, end).
const float* pack_group(const Operands& x, int64_t k, int64_t depth, int64_t begin, int64_t end,
                        int64_t width) {
  Buffer<float>& panels = scratch().panels;
  const int64_t size = width * depth, needed = ceil_div(end - begin, width) * size;
  if (panels.size() < needed) panels = Buffer<float>(needed);
  for (int64_t n = begin; n < end; n += width)
    pack_panel(x, k, depth, n, std::min(width, end - n), width,
               panels.data() + (n - begin) / width * size);
  return panels.data();
}

/// Packs a block of a for multiply_tiles.
const float* pack_rows(const Operands& x, int64_t m, int64_t rows, int64_t k, int64_t depth) {
  float* const to = scratch().a_rows.data();
  if (x.a_transposed)
    libxsmm_otrans(to, x.a_from(m, k), sizeof(float), static_cast<libxsmm_blasint>(rows),
                   static_cast<libxsmm_blasint>(depth),
                   static_cast<libxsmm_blasint>(std::max(x.a.stride, rows)), packed_a_stride);
  else
    widen(ConstMatrixRef(x.a), m, k, rows, depth, to, packed_a_stride);
  return to;
}

void check_shapes(const Operands& x, MatrixView<float> c) {
  GYRE_CHECK(x.k() == x.b_depth() && x.m() == c.rows && x.n() == c.cols,
             "[{}, {}] = [{}, {}] x [{}, {}]", c.rows, c.cols, x.m(), x.k(), x.b_depth(), x.n());
  constexpr int64_t limit = std::numeric_limits<libxsmm_blasint>::max();
  GYRE_CHECK(std::max({x.a.stride, x.b.stride, c.stride}) <= limit, "strides {}, {}, {}",
             x.a.stride, x.b.stride, c.stride);
}

void multiply(const Operands& x, MatrixView<float> c, bool accumulate) {
  check_shapes(x, c);
  if (c.rows == 0 || c.cols == 0) return;
  if (x.k() == 0) {
    if (!accumulate)
      for (int64_t i = 0; i < c.rows; ++i) std::fill_n(c.row(i), c.cols, 0.0F);
    return;
  }
  // With few rows, a packed panel would be reused too rarely.
  const bool pack = c.rows >= usual_blocking.rows || x.b_transposed || x.b.type != DType::f32;
  const bool tiles = c.rows >= usual_blocking.rows && has_tiles();
  const Blocking blocking = tiles ? tile_blocking : usual_blocking;
  // The stride matters only between rows; libxsmm refuses one below the row length.
  const auto stride_of = [](auto view) { return view.rows == 1 ? view.cols : view.stride; };
  Kernels kernels({stride_of(x.a), pack ? blocking.columns : stride_of(x.b), stride_of(c)},
                  x.a_transposed);
  const int64_t depth = even_part(x.k(), blocking.depth);
  const int64_t slice = even_part(depth, blocking.slice),
                group = columns_of_group(c.cols, depth, blocking);
  for (int64_t k = 0; k < x.k(); k += depth) {
    const int64_t depth_now = std::min(depth, x.k() - k);
    for (int64_t first = 0; first < c.cols; first += group) {
      const int64_t last = std::min(first + group, c.cols);
      const float* panels =
          pack ? pack_group(x, k, depth_now, first, last, blocking.columns) : nullptr;
      for (int64_t m = 0; m < c.rows; m += blocking.rows) {
        const int64_t rows = std::min(blocking.rows, c.rows - m);
        const float* packed = tiles ? pack_rows(x, m, rows, k, depth_now) : nullptr;
        for (int64_t n = first; n < last; n += blocking.columns) {
          const float* panel = pack ? panels + (n - first) * depth_now : x.b.as<float>().row(k) + n;
          const int64_t columns = std::min(blocking.columns, last - n);
          float* const to = c.row(m) + n;
          if (!tiles) {
            kernels.get(rows, columns, depth_now, accumulate || k > 0)(panel, x.a_from(m, k), to);
            continue;
          }
          for (int64_t s = 0; s < depth_now; s += slice)
            multiply_tiles({packed + s, packed_a_stride, panel + s * blocking.columns, to, c.stride,
                            rows, columns, std::min(slice, depth_now - s),
                            accumulate || k + s > 0});
        }
      }
    }
  }
}

}  // namespace

void gemm(MatrixView<const float> a, ConstMatrixRef b, MatrixView<float> c, bool accumulate) {
  multiply({a, b, false, false}, c, accumulate);
}
void gemm_a_transposed(MatrixView<const float> a, ConstMatrixRef b, MatrixView<float> c,
                       bool accumulate) {
  multiply({a, b, true, false}, c, accumulate);
}
void gemm_b_transposed(MatrixView<const float> a, ConstMatrixRef b, MatrixView<float> c,
                       bool accumulate) {
  multiply({a, b, false, true}, c, accumulate);
}

}  // namespace gyre
