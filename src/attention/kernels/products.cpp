#include "attention/kernels/products.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "runtime/xsmm_kernel.hpp"

namespace gyre {
namespace {

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
      kernel =
          xsmm_kernel({part, lanes, head_dim_, stride_, lane_stride, lane_stride, false, false});
    kernel(packed, keys + begin * stride_, to + begin * lane_stride);
  });
}

void Products::to_lanes(const float* weights, const float* keys, float* to, int64_t lanes,
                        int64_t count) {
  for_parts(count, [&](int64_t begin, int64_t part) {
    libxsmm_smmfunction& kernel = slot(to_lanes_, lanes, part);
    if (kernel == nullptr)
      kernel = xsmm_kernel({head_dim_, lanes, part, stride_, lane_stride, lane_stride, true, true});
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
        kernel = xsmm_kernel({keys, width, lanes, lane_stride, head_dim_, stride_, false, true});
      kernel(rows + d, weights + begin * lane_stride, to + begin * stride_ + d);
      d += width;
    }
  }
}

}  // namespace gyre
