#include <cstring>
#include <map>

#include "attention/cuda_array_ops.cuh"
#include "core/index.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre {
namespace {

constexpr int array_threads = array_warps * warp_lanes;

/// Elements [at, at + unit) of a line, widened.
template <int unit>
__device__ void load(const std::byte* line, bool narrow, int at, float (&x)[unit]) {
  if constexpr (unit == 1) {
    x[0] = narrow ? to_float(reinterpret_cast<const bf16*>(line)[at])
                  : reinterpret_cast<const float*>(line)[at];
  } else if (narrow) {
    const uint4 bits = *reinterpret_cast<const uint4*>(line + 2 * static_cast<size_t>(at));
    uint16_t values[unit];
    memcpy(values, &bits, sizeof(bits));
    for (int i = 0; i < unit; ++i) x[i] = to_float(bf16{values[i]});
  } else {
    const auto* quads = reinterpret_cast<const uint4*>(line + 4 * static_cast<size_t>(at));
    const uint4 bits[2] = {quads[0], quads[1]};
    memcpy(x, bits, sizeof(bits));
  }
}

template <int unit>
__device__ void store(std::byte* line, bool narrow, int at, const float (&x)[unit]) {
  if constexpr (unit == 1) {
    if (narrow)
      reinterpret_cast<bf16*>(line)[at] = to_bf16(x[0]);
    else
      reinterpret_cast<float*>(line)[at] = x[0];
  } else if (narrow) {
    uint16_t values[unit];
    for (int i = 0; i < unit; ++i) values[i] = to_bf16(x[i]).bits;
    uint4 bits;
    memcpy(&bits, values, sizeof(bits));
    *reinterpret_cast<uint4*>(line + 2 * static_cast<size_t>(at)) = bits;
  } else {
    uint4 bits[2];
    memcpy(bits, x, sizeof(bits));
    auto* quads = reinterpret_cast<uint4*>(line + 4 * static_cast<size_t>(at));
    quads[0] = bits[0];
    quads[1] = bits[1];
  }
}

template <int unit>
__device__ void copy_line(const DeviceCopy& copy, const std::byte* from, std::byte* to, int lane) {
  for (int at = lane * unit; at < copy.width; at += warp_lanes * unit) {
    float x[unit];
    load<unit>(from, copy.from_narrow, at, x);
    if (copy.via_narrow)
      for (int i = 0; i < unit; ++i) x[i] = to_float(to_bf16(x[i]));
    if (copy.add) {
      float sum[unit];
      load<unit>(to, copy.to_narrow, at, sum);
      for (int i = 0; i < unit; ++i) x[i] = sum[i] + x[i];
    }
    store<unit>(to, copy.to_narrow, at, x);
  }
}

__global__ void __launch_bounds__(array_threads)
    copy_lines(const __grid_constant__ CopyTable table) {
  const int block = static_cast<int>(blockIdx.x);
  const DeviceCopy& copy = table.copies[copy_of_block(table, block)];
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes;
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  const int64_t begin = static_cast<int64_t>(block - copy.first_block) * lines_of_a_block;
  const int64_t end = min(begin + lines_of_a_block, copy.lines);
  for (int64_t line = begin + warp; line < end; line += array_warps) {
    const int64_t row = copy.planes == 1 ? line : line / copy.planes;
    const int64_t plane = line - row * copy.planes;
    const std::byte* from =
        copy.from + (row * copy.from_row + plane * copy.from_plane) * (copy.from_narrow ? 2 : 4);
    std::byte* to =
        copy.to + (row * copy.to_row + plane * copy.to_plane) * (copy.to_narrow ? 2 : 4);
    if (copy.unit == 8)
      copy_line<8>(copy, from, to, lane);
    else
      copy_line<1>(copy, from, to, lane);
  }
}

/// One plane of row statistics [rows, heads] as kernels take it.
template <class T>
struct Stats {
  T* data;
  int64_t rows, heads, stride;
  explicit Stats(MatrixView<T> m) : data(m.data), rows(m.rows), heads(m.cols), stride(m.stride) {}
  __device__ T& at(int64_t row, int64_t head) const { return data[row * stride + head]; }
};

__global__ void __launch_bounds__(array_threads) fill_stats(Stats<float> to, float value) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * array_threads + threadIdx.x;
  if (i < to.rows * to.heads) to.at(i / to.heads, i % to.heads) = value;
}

/// The (row, head) of a warp.
struct RowHead {
  int64_t row, head;
};
/// False behind the last one.
__device__ bool find_row_head(int64_t rows, int64_t heads, RowHead& at) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * array_warps + threadIdx.x / warp_lanes;
  at = {i / heads, i % heads};
  return at.row < rows;
}

/// A matrix of heads as kernels take it.
struct HeadRows {
  const std::byte* data;
  int64_t stride;
  int dim;
  bool narrow;
  __device__ const std::byte* line(const RowHead& at) const {
    return data + (at.row * stride + at.head * dim) * (narrow ? 2 : 4);
  }
};
HeadRows head_rows(const ConstMatrixRef& m, int64_t heads) {
  return {m.data, m.stride, static_cast<int>(m.cols / heads), m.type == DType::bf16};
}

__global__ void __launch_bounds__(array_threads)
    scale_by_sinks(HeadRows out, Stats<float> lse, const float* sinks) {
  RowHead at;
  if (!find_row_head(lse.rows, lse.heads, at)) return;
  const float before = lse.at(at.row, at.head);
  if (before == -std::numeric_limits<float>::infinity()) return;  // padding
  const SinkWeights with = take_in_sink(before, sinks[at.head]);
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  __syncwarp();  // all lanes have read what one of them writes
  if (lane == 0) lse.at(at.row, at.head) = with.lse;
  auto* line = const_cast<std::byte*>(out.line(at));
  for (int d = lane; d < out.dim; d += warp_lanes) {
    float x[1];
    load<1>(line, out.narrow, d, x);
    x[0] *= with.keep;
    store<1>(line, out.narrow, d, x);
  }
}

__global__ void __launch_bounds__(array_threads)
    row_deltas(HeadRows out, HeadRows d_out, Stats<float> delta) {
  RowHead at;
  if (!find_row_head(delta.rows, delta.heads, at)) return;
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  double sum = 0;
  for (int d = lane; d < out.dim; d += warp_lanes) {
    float o[1], g[1];
    load<1>(out.line(at), out.narrow, d, o);
    load<1>(d_out.line(at), d_out.narrow, d, g);
    sum += static_cast<double>(o[0]) * static_cast<double>(g[0]);
  }
  sum = warp_sum(sum);
  if (lane == 0) delta.at(at.row, at.head) = static_cast<float>(sum);
}

/// A block for each head.
__global__ void __launch_bounds__(array_threads)
    sum_sink_gradients(Stats<const float> lse, Stats<const float> delta, const float* sinks,
                       double* d_sinks) {
  __shared__ double sums[array_warps];
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  double sum = 0;
  for (int64_t row = thread; row < lse.rows; row += array_threads)
    sum += sink_gradient_term(sinks[head], lse.at(row, head), delta.at(row, head));
  sum = warp_sum(sum);
  if (thread % warp_lanes == 0) sums[thread / warp_lanes] = sum;
  __syncthreads();
  if (thread != 0) return;
  double total = 0;
  for (int warp = 0; warp < array_warps; ++warp) total += sums[warp];
  d_sinks[head] -= total;
}

int32_t small(int64_t x) {
  GYRE_CHECK(x >= 0 && x <= std::numeric_limits<int32_t>::max(), "a stride of {} elements", x);
  return static_cast<int32_t>(x);
}

/// Whether 8 elements at once can be moved: every line begins at a multiple of 16 bytes.
bool in_eights(const RowCopy& c) {
  const auto aligned = [&](const RowPlace& place) {
    return reinterpret_cast<uintptr_t>(place.data) % 16 == 0 && place.row % 8 == 0 &&
           (c.planes == 1 || place.plane % 8 == 0);
  };
  return c.width % 8 == 0 && aligned(c.from) && aligned(c.to);
}

DeviceCopy device_copy(const RowCopy& c) {
  const auto narrow = [](DType type) {
    GYRE_CHECK(type == DType::f32 || type == DType::bf16, "attention arrays of {}", name_of(type));
    return type == DType::bf16;
  };
  DeviceCopy copy{};
  copy.from = c.from.data;
  copy.to = c.to.data;
  copy.lines = c.rows * c.planes;
  copy.from_row = small(c.from.row);
  copy.from_plane = small(c.from.plane);
  copy.to_row = small(c.to.row);
  copy.to_plane = small(c.to.plane);
  copy.width = small(c.width);
  copy.planes = static_cast<int8_t>(c.planes);
  copy.unit = in_eights(c) ? 8 : 1;
  copy.from_narrow = narrow(c.from.type);
  copy.via_narrow = narrow(c.via);
  copy.to_narrow = narrow(c.to.type);
  copy.add = c.add;
  return copy;
}

/// The bytes that the copies of a table write.
class Written {
 public:
  /// False if some of the copy's bytes are there already; they are not taken then.
  bool take(const RowCopy& c) {
    const int64_t elements = (c.rows - 1) * c.to.row + (c.planes - 1) * c.to.plane + c.width;
    const std::byte* end = c.to.data + elements * static_cast<int64_t>(size_of(c.to.type));
    const auto next = ranges_.lower_bound(c.to.data);
    if (next != ranges_.end() && next->first < end) return false;
    if (next != ranges_.begin() && std::prev(next)->second > c.to.data) return false;
    ranges_.emplace(c.to.data, end);
    return true;
  }
  void clear() { ranges_.clear(); }

 private:
  std::map<const std::byte*, const std::byte*> ranges_;  // begin -> end
};

unsigned blocks_for(int64_t work, int64_t of_a_block) {
  const int64_t blocks = ceil_div(work, of_a_block);
  GYRE_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "{} blocks", blocks);
  return static_cast<unsigned>(blocks);
}

class CudaArrayOps final : public ArrayOps {
 public:
  explicit CudaArrayOps(Stream& stream) : stream_(cuda_handle(stream)) {}

  void copy(std::span<const RowCopy> copies) override {
    for (const CopyTable& table : copy_tables(copies))
      start(static_cast<unsigned>(table.blocks), copy_lines, table);
  }
  void fill(MatrixView<float> to, float value) override {
    start(blocks_for(to.rows * to.cols, array_threads), fill_stats, Stats(to), value);
  }
  void take_in_sinks(const MatrixRef& out, MatrixView<float> lse, const float* sinks) override {
    if (lse.rows * lse.cols == 0) return;
    start(blocks_for(lse.rows * lse.cols, array_warps), scale_by_sinks, head_rows(out, lse.cols),
          Stats(lse), sinks);
  }
  void delta(const ConstMatrixRef& out, const ConstMatrixRef& d_out,
             MatrixView<float> delta) override {
    if (delta.rows * delta.cols == 0) return;
    start(blocks_for(delta.rows * delta.cols, array_warps), row_deltas, head_rows(out, delta.cols),
          head_rows(d_out, delta.cols), Stats(delta));
  }
  void add_sink_gradient(MatrixView<const float> lse, MatrixView<const float> delta,
                         const float* sinks, double* d_sinks) override {
    start(static_cast<unsigned>(lse.cols), sum_sink_gradients, Stats(lse), Stats(delta), sinks,
          d_sinks);
  }

 private:
  template <class Kernel, class... Args>
  void start(unsigned blocks, Kernel kernel, const Args&... args) {
    launch({blocks, array_threads, stream_}, kernel, args...);
  }

  cudaStream_t stream_;
};

}  // namespace

std::vector<CopyTable> copy_tables(std::span<const RowCopy> copies) {
  bool adds = false;
  for (const RowCopy& c : copies) adds = adds || c.add;
  std::vector<CopyTable> tables;
  Written written;
  for (const RowCopy& c : copies) {
    if (c.rows * c.planes * c.width == 0) continue;
    const bool alone = adds && !written.take(c);
    const bool full = !tables.empty() && tables.back().count == most_copies;
    if (tables.empty() || alone || full) {
      tables.emplace_back();
      written.clear();
      if (adds) written.take(c);
    }
    CopyTable& table = tables.back();
    DeviceCopy copy = device_copy(c);
    copy.first_block = table.blocks;
    table.copies[table.count++] = copy;
    table.blocks += static_cast<int32_t>(blocks_for(copy.lines, lines_of_a_block));
  }
  return tables;
}

std::unique_ptr<ArrayOps> make_cuda_array_ops(Stream& stream) {
  return std::make_unique<CudaArrayOps>(stream);
}

}  // namespace gyre
