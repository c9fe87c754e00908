#include <algorithm>
#include <map>

#include "attention/cuda_array_ops.cuh"
#include "core/index.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre {
namespace {

/// `unit` elements that a lane moves at once: 1, or 8 where every line is aligned to 16 bytes.
template <class T, int unit>
struct alignas(unit == 1 ? sizeof(T) : 16) Pack {
  T values[unit];
};

/// Copies lines [begin, begin + lines) of a copy. Each lane loads four packs before it uses the
/// first, to keep four loads in flight. Lines of one copy do not overlap.
template <class From, class To, int unit, bool add>
__device__ void copy_packs(const DeviceCopy& copy, int64_t begin, int lines) {
  constexpr int at_once = 4;
  // Rounding via bf16 changes nothing if the source is bf16 or the result becomes bf16 next.
  constexpr bool via_changes = std::is_same_v<From, float> && (add || std::is_same_v<To, float>);
  const BlockLines block(copy, begin);
  const From* from = reinterpret_cast<const From*>(copy.from) + block.first_row * copy.from_row;
  To* to = reinterpret_cast<To*>(copy.to) + block.first_row * copy.to_row;
  PackWalk walk(copy.width / unit, static_cast<int>(threadIdx.x));
  while (walk.line < lines) {
    Pack<From, unit> x[at_once];
    Pack<To, unit> old[at_once], *place[at_once];
    bool inside[at_once];
    GYRE_UNROLL
    for (int i = 0; i < at_once; ++i, walk.advance()) {
      inside[i] = walk.line < lines;
      const int line = inside[i] ? walk.line : 0, at = walk.pack * unit;  // outside: reads line 0
      x[i] = *reinterpret_cast<const Pack<From, unit>*>(
          from + block.at(line, copy.from_row, copy.from_plane) + at);
      place[i] =
          reinterpret_cast<Pack<To, unit>*>(to + block.at(line, copy.to_row, copy.to_plane) + at);
      if constexpr (add) old[i] = *place[i];
    }
    GYRE_UNROLL
    for (int i = 0; i < at_once; ++i) {
      Pack<To, unit> result;
      GYRE_UNROLL
      for (int e = 0; e < unit; ++e) {
        float value = to_float(x[i].values[e]);
        if (via_changes && copy.via_narrow) value = to_float(to_bf16(value));
        if constexpr (add) value = to_float(old[i].values[e]) + value;
        result.values[e] = converted<To>(value);
      }
      if (inside[i]) *place[i] = result;
    }
  }
}

template <class From, class To>
__device__ void copy_of_types(const DeviceCopy& copy, int64_t begin, int lines) {
  if (copy.unit == 8 && copy.add)
    copy_packs<From, To, 8, true>(copy, begin, lines);
  else if (copy.unit == 8)
    copy_packs<From, To, 8, false>(copy, begin, lines);
  else if (copy.add)
    copy_packs<From, To, 1, true>(copy, begin, lines);
  else
    copy_packs<From, To, 1, false>(copy, begin, lines);
}

__global__ void __launch_bounds__(array_threads)
    copy_lines(const __grid_constant__ CopyTable table) {
  const int block = static_cast<int>(blockIdx.x);
  const DeviceCopy& copy = table.copies[copy_of_block(table, block)];
  const int64_t begin = static_cast<int64_t>(block - copy.first_block) * lines_of_a_block;
  const auto lines =
      static_cast<int>(min(copy.lines - begin, static_cast<int64_t>(lines_of_a_block)));
  if (copy.from_narrow && copy.to_narrow)
    copy_of_types<bf16, bf16>(copy, begin, lines);
  else if (copy.from_narrow)
    copy_of_types<bf16, float>(copy, begin, lines);
  else if (copy.to_narrow)
    copy_of_types<float, bf16>(copy, begin, lines);
  else
    copy_of_types<float, float>(copy, begin, lines);
}

/// One plane of row statistics [rows, heads] as a kernel argument.
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

/// One thread sums one element of the part of one row.
__global__ void __launch_bounds__(array_threads)
    sum_parts(MatrixView<float> heads, int64_t dim, int64_t part) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * array_threads + threadIdx.x;
  if (i < heads.rows * part)
    sum_elements(heads.data + i / part * heads.stride + dim - part + i % part, heads.cols, dim);
}

/// Row and head of a warp.
struct RowHead {
  int64_t row, head;
};
/// Sets the row and head of this warp; returns false past the last row.
__device__ bool find_row_head(int64_t rows, int64_t heads, RowHead& at) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * array_warps + threadIdx.x / warp_lanes;
  at = {i / heads, i % heads};
  return at.row < rows;
}

/// A matrix [rows, heads · dim] as a kernel argument.
struct HeadRows {
  const std::byte* data;
  int64_t stride;
  int dim;
  bool narrow;
  __device__ const std::byte* line(const RowHead& at) const {
    return data + (at.row * stride + at.head * dim) * (narrow ? 2 : 4);
  }
};
__device__ float element(const std::byte* line, bool narrow, int at) {
  return narrow ? to_float(reinterpret_cast<const bf16*>(line)[at])
                : reinterpret_cast<const float*>(line)[at];
}
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
  __syncwarp();  // all lanes have read `before`, which lane 0 overwrites
  if (lane == 0) lse.at(at.row, at.head) = with.lse;
  auto* line = const_cast<std::byte*>(out.line(at));
  for (int d = lane; d < out.dim; d += warp_lanes) {
    const float x = with.keep * element(line, out.narrow, d);
    if (out.narrow)
      reinterpret_cast<bf16*>(line)[d] = to_bf16(x);
    else
      reinterpret_cast<float*>(line)[d] = x;
  }
}

__global__ void __launch_bounds__(array_threads)
    row_deltas(HeadRows out, HeadRows d_out, Stats<float> delta) {
  RowHead at;
  if (!find_row_head(delta.rows, delta.heads, at)) return;
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  double sum = 0;
  for (int d = lane; d < out.dim; d += warp_lanes) {
    const float o = element(out.line(at), out.narrow, d);
    const float g = element(d_out.line(at), d_out.narrow, d);
    sum += o * static_cast<double>(g);
  }
  sum = warp_sum(sum);
  if (lane == 0) delta.at(at.row, at.head) = static_cast<float>(sum);
}

constexpr int max_sink_parts = 256;

/// Threads of a block along the head axis: a power of two.
__host__ __device__ constexpr int sink_width(int64_t heads) {
  int width = 1;
  while (width < heads && width < warp_lanes) width *= 2;
  return width;
}
unsigned sink_parts(int64_t rows, int64_t heads) {
  return static_cast<unsigned>(
      std::min<int64_t>(max_sink_parts, ceil_div(rows, array_threads / sink_width(heads))));
}

/// Writes partial [gridDim.x][heads]: each block sums every gridDim.x-th group of rows.
__global__ void __launch_bounds__(array_threads)
    sum_sink_parts(Stats<const float> lse, Stats<const float> delta, const float* sinks,
                   double* partial) {
  __shared__ double sums[array_threads];
  const int width = sink_width(lse.heads), thread = static_cast<int>(threadIdx.x);
  const int64_t head = static_cast<int64_t>(blockIdx.y) * width + thread % width;
  const int64_t together = array_threads / width;
  double sum = 0;
  if (head < lse.heads)
    for (int64_t row = blockIdx.x * together + thread / width; row < lse.rows;
         row += gridDim.x * together)
      sum += sink_gradient_term(sinks[head], lse.at(row, head), delta.at(row, head));
  sums[thread] = sum;
  __syncthreads();
  if (thread >= width || head >= lse.heads) return;
  for (int other = thread + width; other < array_threads; other += width) sum += sums[other];
  partial[blockIdx.x * lse.heads + head] = sum;
}

/// Subtracts the sums of partial [parts][heads] from d_sinks; one warp per head.
__global__ void __launch_bounds__(array_threads)
    take_off_sink_parts(const double* partial, int parts, int heads, double* d_sinks) {
  const int head = static_cast<int>(blockIdx.x * array_warps + threadIdx.x / warp_lanes);
  if (head >= heads) return;
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  double sum = 0;
  for (int part = lane; part < parts; part += warp_lanes) sum += partial[part * heads + head];
  sum = warp_sum(sum);
  if (lane == 0) d_sinks[head] -= sum;
}

int32_t small(int64_t x) {
  GYRE_CHECK(x >= 0 && x <= std::numeric_limits<int32_t>::max(), "a stride of {} elements", x);
  return static_cast<int32_t>(x);
}

/// Whether 8 elements can be moved at once: every line begins at a multiple of 16 bytes.
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

/// The nonempty copies, with at most max_planes planes each.
std::vector<RowCopy> in_parts(std::span<const RowCopy> copies) {
  std::vector<RowCopy> parts;
  for (RowCopy part : copies) {
    if (part.rows * part.width == 0) continue;
    for (int64_t left = part.planes; left > 0; left -= part.planes) {
      part.planes = std::min<int64_t>(left, max_planes);
      parts.push_back(part);
      for (RowPlace* place : {&part.from, &part.to})
        place->data += part.planes * place->plane * size_of(place->type);
    }
  }
  return parts;
}

/// Byte ranges that the copies of a table write.
class Written {
 public:
  /// Adds the bytes that a copy writes; if they overlap earlier ones, adds none and returns false.
  bool take(const RowCopy& c) {
    const int64_t elements = (c.rows - 1) * c.to.row + (c.planes - 1) * c.to.plane + c.width;
    const std::byte* end = c.to.data + elements * size_of(c.to.type);
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
  void sum_over_heads(MatrixView<float> heads, int64_t dim, int64_t part) override {
    if (heads.rows * heads.cols * part == 0) return;
    start(blocks_for(heads.rows * part, array_threads), sum_parts, heads, dim, part);
  }
  void add_sink_gradient(MatrixView<const float> lse, MatrixView<const float> delta,
                         const float* sinks, double* d_sinks) override {
    const int64_t rows = lse.rows, heads = lse.cols;
    if (rows * heads == 0) return;
    const unsigned parts = sink_parts(rows, heads);
    if (sink_parts_.size() < parts * heads)
      sink_parts_ = Buffer<double>(max_sink_parts * heads, MemorySpace::device);
    const dim3 grid(parts, blocks_for(heads, sink_width(heads)));
    launch({grid, array_threads, stream_}, sum_sink_parts, Stats(lse), Stats(delta), sinks,
           sink_parts_.data());
    start(blocks_for(heads, array_warps), take_off_sink_parts, sink_parts_.data(),
          static_cast<int>(parts), static_cast<int>(heads), d_sinks);
  }

 private:
  template <class Kernel, class... Args>
  void start(unsigned blocks, Kernel kernel, const Args&... args) {
    launch({blocks, array_threads, stream_}, kernel, args...);
  }

  cudaStream_t stream_;
  Buffer<double> sink_parts_;  // shared by successive launches
};

}  // namespace

std::vector<CopyTable> copy_tables(std::span<const RowCopy> copies) {
  bool adds = false;
  for (const RowCopy& c : copies) adds = adds || c.add;
  std::vector<CopyTable> tables;
  Written written;
  for (const RowCopy& c : in_parts(copies)) {
    const bool alone = adds && !written.take(c);
    const bool full = !tables.empty() && tables.back().count == max_copies;
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
