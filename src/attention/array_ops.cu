#include <algorithm>

#include "attention/array_ops.hpp"
#include "runtime/for_rows.cuh"
#include "runtime/row_copy.hpp"

namespace gyre {
namespace {

/// Calls f with a value of the C++ type of elements of `type`, f32 or bf16.
template <class F>
void with_type(DType type, F f) {
  GYRE_CHECK(type == DType::f32 || type == DType::bf16, "attention arrays of {}", name_of(type));
  if (type == DType::f32)
    f(float{});
  else
    f(bf16{});
}

/// A matrix [rows, heads · dim] for loops over rows and heads: pair i is head i % heads of row
/// i / heads.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride, heads, dim;
  HeadRows(MatrixView<T> m, int64_t heads_)
      : data(m.data), stride(m.stride), heads(heads_), dim(heads_ == 0 ? 0 : m.cols / heads_) {}
  GYRE_HOST_DEVICE T* line(int64_t i) const { return data + i / heads * stride + i % heads * dim; }
};

struct Fill {
  HeadRows<float> to;
  float value;
  GYRE_HOST_DEVICE void operator()(int64_t i) const { *to.line(i) = value; }
};

struct MergeStatistics {
  HeadRows<float> lse;
  HeadRows<const float> partial;
  GYRE_HOST_DEVICE void operator()(int64_t i) const {
    const float a = *lse.line(i), b = *partial.line(i);
    const float top = a < b ? b : a, low = a < b ? a : b;
    const bool is_empty = low == -std::numeric_limits<float>::infinity();
    *lse.line(i) = is_empty ? top : top + std::log1p(std::exp(low - top));
  }
};

/// Weight of a partial output in a merged one, whose log-sum-exp is `lse`.
GYRE_HOST_DEVICE inline float weight_of(float partial_lse, float lse) {
  const bool is_empty = partial_lse == -std::numeric_limits<float>::infinity();
  return is_empty ? 0 : std::exp(partial_lse - lse);
}

template <class T>
struct RescaleOutput {
  HeadRows<T> out;
  HeadRows<const float> lse, before;
  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t i, const Lanes& lanes) const {
    const float weight = weight_of(*before.line(i), *lse.line(i));
    T* line = out.line(i);
    for (int64_t d = lanes.first; d < out.dim; d += lanes.count)
      line[d] = converted<T>(to_float(line[d]) * weight);
  }
};

template <class T>
struct AddOutput {
  HeadRows<T> out;
  HeadRows<const float> lse;
  HeadRows<const T> part;
  HeadRows<const float> part_lse;
  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t i, const Lanes& lanes) const {
    const float weight = weight_of(*part_lse.line(i), *lse.line(i));
    T* to = out.line(i);
    const T* from = part.line(i);
    for (int64_t d = lanes.first; d < out.dim; d += lanes.count)
      to[d] = converted<T>(to_float(to[d]) + to_float(from[d]) * weight);
  }
};

template <class T>
struct TakeInSink {
  HeadRows<T> out;
  HeadRows<float> lse;
  const float* sinks;
  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t i, const Lanes& lanes) const {
    const float before = *lse.line(i);
    if (before == -std::numeric_limits<float>::infinity()) return;  // padding
    const SinkWeights with = take_in_sink(before, sinks[i % lse.heads]);
    lanes.wait_for_others();  // they have read `before`, which the first lane overwrites
    if (lanes.first == 0) *lse.line(i) = with.lse;
    T* line = out.line(i);
    for (int64_t d = lanes.first; d < out.dim; d += lanes.count)
      line[d] = converted<T>(to_float(line[d]) * with.keep);
  }
};

template <class Out, class DOut>
struct Delta {
  HeadRows<const Out> out;
  HeadRows<const DOut> d_out;
  HeadRows<float> delta;
  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t i, const Lanes& lanes) const {
    const Out* o = out.line(i);
    const DOut* g = d_out.line(i);
    double sum = 0;
    for (int64_t d = lanes.first; d < out.dim; d += lanes.count)
      sum += to_float(o[d]) * static_cast<double>(to_float(g[d]));
    sum = lanes.sum(sum);
    if (lanes.first == 0) *delta.line(i) = static_cast<float>(sum);
  }
};

/// Sums one element of the part of one row.
struct SumElement {
  MatrixView<float> heads;
  int64_t dim, part;
  GYRE_HOST_DEVICE void operator()(int64_t i) const {
    float* x = heads.data + i / part * heads.stride + dim - part + i % part;
    double sum = 0;
    for (int64_t at = 0; at < heads.cols; at += dim) {
      sum += x[at];
      x[at] = 0;
    }
    x[0] = static_cast<float>(sum);
  }
};

#ifdef GYRE_WITH_CUDA
/// One plane of row statistics [rows, heads] as a kernel argument.
struct Stats {
  const float* data;
  int64_t rows, heads, stride;
  explicit Stats(MatrixView<const float> m)
      : data(m.data), rows(m.rows), heads(m.cols), stride(m.stride) {}
  __device__ float at(int64_t row, int64_t head) const { return data[row * stride + head]; }
};

constexpr int array_warps = loop_threads / warp_lanes;
constexpr int max_sink_parts = 256;

/// Threads of a block along the head axis: a power of two.
__host__ __device__ constexpr int sink_width(int64_t heads) {
  int width = 1;
  while (width < heads && width < warp_lanes) width *= 2;
  return width;
}
unsigned sink_parts(int64_t rows, int64_t heads) {
  return static_cast<unsigned>(
      std::min<int64_t>(max_sink_parts, ceil_div(rows, loop_threads / sink_width(heads))));
}

/// Writes partial [gridDim.x][heads]: each block sums every gridDim.x-th group of rows.
__global__ void __launch_bounds__(loop_threads)
    sum_sink_parts(Stats lse, Stats delta, const float* sinks, double* partial) {
  __shared__ double sums[loop_threads];
  const int width = sink_width(lse.heads), thread = static_cast<int>(threadIdx.x);
  const int64_t head = static_cast<int64_t>(blockIdx.y) * width + thread % width;
  const int64_t together = loop_threads / width;
  double sum = 0;
  if (head < lse.heads)
    for (int64_t row = blockIdx.x * together + thread / width; row < lse.rows;
         row += gridDim.x * together)
      sum += sink_gradient_term(sinks[head], lse.at(row, head), delta.at(row, head));
  sums[thread] = sum;
  __syncthreads();
  if (thread >= width || head >= lse.heads) return;
  for (int other = thread + width; other < loop_threads; other += width) sum += sums[other];
  partial[blockIdx.x * lse.heads + head] = sum;
}

/// Subtracts the sums of partial [parts][heads] from d_sinks; one warp per head.
__global__ void __launch_bounds__(loop_threads)
    take_off_sink_parts(const double* partial, int parts, int heads, double* d_sinks) {
  const int head = static_cast<int>(blockIdx.x * array_warps + threadIdx.x / warp_lanes);
  if (head >= heads) return;
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  double sum = 0;
  for (int part = lane; part < parts; part += warp_lanes) sum += partial[part * heads + head];
  sum = warp_sum(sum);
  if (lane == 0) d_sinks[head] -= sum;
}

#endif

}  // namespace

void fill(MatrixView<float> to, float value, Stream& stream) {
  for_elements(stream, to.rows * to.cols, Fill{{to, to.cols}, value});
}

void merge_statistics(MatrixView<float> lse, MatrixView<const float> partial, Stream& stream) {
  for_elements(stream, lse.rows * lse.cols,
               MergeStatistics{{lse, lse.cols}, {partial, partial.cols}});
}

void rescale_output(const Partial& to, MatrixView<const float> before, Stream& stream) {
  const int64_t heads = to.lse.cols;
  with_type(to.out.type, [&](auto t) {
    using T = decltype(t);
    for_rows(stream, to.lse.rows * heads,
             RescaleOutput<T>{{to.out.as<T>(), heads}, {to.lse, heads}, {before, heads}});
  });
}

void add_output(const Partial& to, const Partial& part, Stream& stream) {
  const int64_t heads = to.lse.cols;
  with_type(to.out.type, [&](auto t) {
    using T = decltype(t);
    for_rows(stream, to.lse.rows * heads,
             AddOutput<T>{{to.out.as<T>(), heads},
                          {to.lse, heads},
                          {ConstMatrixRef(part.out).as<T>(), heads},
                          {part.lse, heads}});
  });
}

void take_in_sinks(const MatrixRef& out, MatrixView<float> lse, const float* sinks,
                   Stream& stream) {
  with_type(out.type, [&](auto t) {
    using T = decltype(t);
    for_rows(stream, lse.rows * lse.cols,
             TakeInSink<T>{{out.as<T>(), lse.cols}, {lse, lse.cols}, sinks});
  });
}

void row_deltas(const ConstMatrixRef& out, const ConstMatrixRef& d_out, MatrixView<float> delta,
                Stream& stream) {
  with_type(out.type, [&](auto a) {
    with_type(d_out.type, [&](auto b) {
      using A = decltype(a);
      using B = decltype(b);
      for_rows(
          stream, delta.rows * delta.cols,
          Delta<A, B>{{out.as<A>(), delta.cols}, {d_out.as<B>(), delta.cols}, {delta, delta.cols}});
    });
  });
}

void sum_over_heads(MatrixView<float> heads, int64_t dim, int64_t part, Stream& stream) {
  if (heads.cols > 0) for_elements(stream, heads.rows * part, SumElement{heads, dim, part});
}

void SinkGradients::add(MatrixView<const float> lse, MatrixView<const float> delta,
                        const float* sinks, double* d_sinks, Stream& stream) {
  const int64_t rows = lse.rows, heads = lse.cols;
  if (stream.space() == MemorySpace::host) {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = 0; r < rows; ++r)
        d_sinks[h] -= sink_gradient_term(sinks[h], lse(r, h), delta(r, h));
    return;
  }
#ifdef GYRE_WITH_CUDA
  if (rows * heads == 0) return;
  const unsigned parts = sink_parts(rows, heads);
  if (parts_.size() < parts * heads)
    parts_ = Buffer<double>(max_sink_parts * heads, MemorySpace::device);
  const auto blocks = [](int64_t n, int64_t of_block) {
    return static_cast<unsigned>(ceil_div(n, of_block));
  };
  launch({dim3(parts, blocks(heads, sink_width(heads))), loop_threads, cuda_handle(stream)},
         sum_sink_parts, Stats(lse), Stats(delta), sinks, parts_.data());
  launch({blocks(heads, array_warps), loop_threads, cuda_handle(stream)}, take_off_sink_parts,
         parts_.data(), static_cast<int>(parts), static_cast<int>(heads), d_sinks);
#endif
}

}  // namespace gyre
