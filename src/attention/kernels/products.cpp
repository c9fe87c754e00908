#include "attention/kernels/products.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"

// libxsmm is column-major: a matrix [rows][columns] here is [columns, rows] there.

namespace gyre {
namespace {

struct Gemm {
  int64_t m, n, k;
  int64_t lda, ldb, ldc;
  int flags;
  float beta;
};

libxsmm_smmfunction generate(const Gemm& g) {
  const auto narrow = [](int64_t x) { return static_cast<libxsmm_blasint>(x); };
  const libxsmm_blasint lda = narrow(g.lda), ldb = narrow(g.ldb), ldc = narrow(g.ldc);
  const float alpha = 1;
  const int prefetch = LIBXSMM_PREFETCH_NONE;
  const libxsmm_smmfunction kernel =
      libxsmm_smmdispatch(narrow(g.m), narrow(g.n), narrow(g.k), &lda, &ldb, &ldc, &alpha, &g.beta,
                          &g.flags, &prefetch);
  if (kernel == nullptr)
    throw_runtime("libxsmm has no f32 kernel for {} x {} x {} on this processor", g.m, g.n, g.k);
  return kernel;
}

template <class Table>
libxsmm_smmfunction& slot(Table& table, int64_t lanes, int64_t keys) {
  return table[lanes / lane_granularity - 1][keys];
}

template <class Body>
void for_parts(int64_t count, Body body) {
  const int64_t even = count / lane_granularity * lane_granularity;
  if (even > 0) body(int64_t{0}, even);
  if (count > even) body(even, count - even);
}

}  // namespace

Products::Products(int64_t head_dim, int64_t stride) : head_dim_(head_dim), stride_(stride) {
  GYRE_CHECK(stride >= head_dim && stride <= std::numeric_limits<libxsmm_blasint>::max(),
             "rows of {} floats are {} apart", head_dim, stride);
}

void Products::score(const float* packed, const float* keys, float* to, int64_t lanes,
                     int64_t count) {
  for_parts(count, [&](int64_t begin, int64_t part) {
    libxsmm_smmfunction& kernel = slot(scores_, lanes, part);
    if (kernel == nullptr)
      kernel = generate(
          {lanes, part, head_dim_, lane_stride, stride_, lane_stride, LIBXSMM_GEMM_FLAG_NONE, 0});
    kernel(packed, keys + begin * stride_, to + begin * lane_stride);
  });
}

void Products::to_lanes(const float* weights, const float* keys, float* to, int64_t lanes,
                        int64_t count) {
  for_parts(count, [&](int64_t begin, int64_t part) {
    libxsmm_smmfunction& kernel = slot(to_lanes_, lanes, part);
    if (kernel == nullptr)
      kernel = generate({lanes, head_dim_, part, lane_stride, stride_, lane_stride,
                         LIBXSMM_GEMM_FLAG_TRANS_B, 1});
    kernel(weights + begin * lane_stride, keys + begin * stride_, to);
  });
}

void Products::to_keys(const float* weights, const float* rows, float* to, int64_t lanes,
                       int64_t count) {
  constexpr int64_t widths[] = {lane_stride, lane_granularity, 1};  // tried in this order
  for (int64_t begin = 0; begin < count; begin += lane_granularity) {
    const int64_t keys = std::min(lane_granularity, count - begin);
    for (int64_t d = 0; d < head_dim_;) {
      const int64_t left = head_dim_ - d;
      const size_t kind = left >= widths[0] ? 0 : left >= widths[1] ? 1 : 2;
      const int64_t width = kind == 1 ? widths[1] : left / widths[kind] * widths[kind];
      libxsmm_smmfunction& kernel = slot(to_keys_[kind], lanes, keys);
      if (kernel == nullptr)
        kernel = generate(
            {width, keys, lanes, head_dim_, lane_stride, stride_, LIBXSMM_GEMM_FLAG_NONE, 1});
      kernel(rows + d, weights + begin * lane_stride, to + begin * stride_ + d);
      d += width;
    }
  }
}

}  // namespace gyre
