#include <algorithm>
#include <limits>

#include "attention/kernels/cuda_merge.hpp"
#include "attention/merge.hpp"
#include "core/index.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"

namespace gyre {
namespace {

constexpr int threads = 256;
constexpr int rows_of_block = 4;

/// `width` consecutive elements, moved at once.
template <class T, int width>
struct alignas(width * sizeof(T)) Pack {
  T values[width];
};

/// A MatrixView as a kernel argument.
template <class T>
struct Rows {
  T* data;
  int64_t cols, stride;
  explicit Rows(MatrixView<T> m) : data(m.data), cols(m.cols), stride(m.stride) {}
  __device__ T* row(int64_t r) const { return data + r * stride; }
  __device__ T& operator()(int64_t r, int64_t c) const { return data[r * stride + c]; }
};

__device__ float as_float(float x) {
  return x;
}
__device__ float as_float(bf16 x) {
  return to_float(x);
}
template <class T>
__device__ T rounded(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return to_bf16(x);
}

dim3 grid_of(const DeviceRound& round) {
  return {static_cast<unsigned>((round.longest + rows_of_block - 1) / rows_of_block),
          static_cast<unsigned>(round.count), 1};
}

/// Whether 8 elements can be moved at once: all addresses and strides are aligned.
template <class Byte>
bool in_packs(const BasicMatrixRef<Byte>& m, int64_t head_dim) {
  constexpr int64_t width = 8;
  const uintptr_t bytes = width * size_of(m.type);
  return head_dim % width == 0 && m.stride % width == 0 &&
         reinterpret_cast<uintptr_t>(m.data) % bytes == 0;
}

template <class From, class To, int width>
__global__ void merge_rows(const RowPiece* pieces, Rows<const From> partial,
                           Rows<const float> partial_lse, Rows<To> out, Rows<float> lse,
                           Update update) {
  constexpr float empty = -std::numeric_limits<float>::infinity();
  auto* weights = reinterpret_cast<MergeWeights<float>*>(dynamic_shared());  // [heads]
  const RowPiece piece = pieces[blockIdx.y];
  const auto heads = static_cast<int>(lse.cols), columns = static_cast<int>(out.cols);
  const int head_dim = columns / heads;
  const int64_t first = int64_t{blockIdx.x} * rows_of_block;
  for (int64_t i = first; i < min(first + rows_of_block, piece.length); ++i) {
    const int64_t row = piece.row + i, scratch = piece.scratch + i * piece.step;
    for (int h = static_cast<int>(threadIdx.x); h < heads; h += threads) {
      weights[h] = merge_lse(update == Update::add ? lse(row, h) : empty, partial_lse(scratch, h));
      lse(row, h) = weights[h].lse;
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x) * width; c < columns; c += threads * width) {
      const MergeWeights<float> w = weights[c / head_dim];
      const auto p = *reinterpret_cast<const Pack<From, width>*>(partial.row(scratch) + c);
      auto* to = reinterpret_cast<Pack<To, width>*>(out.row(row) + c);
      Pack<To, width> o{};
      // A weight of 0 means an empty side, whose values are not used.
      if (w.w1 != 0) o = *to;
      for (int x = 0; x < width; ++x)
        o.values[x] = rounded<To>((w.w1 != 0 ? w.w1 * as_float(o.values[x]) : 0) +
                                  (w.w2 != 0 ? w.w2 * as_float(p.values[x]) : 0));
      *to = o;
    }
    __syncthreads();  // before the next row's weights
  }
}

template <class T>
__global__ void stand_in_rows(const RowPiece* pieces, Rows<const T> d_out, Rows<const float> lse,
                              Rows<const float> delta, Rows<T> stand_in, Rows<float> scratch_lse) {
  const RowPiece piece = pieces[blockIdx.y];
  const auto heads = static_cast<int>(lse.cols);
  const int head_dim = static_cast<int>(d_out.cols) / heads;
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  const int64_t first = int64_t{blockIdx.x} * rows_of_block;
  const int64_t rows = min(int64_t{rows_of_block}, piece.length - first);
  // One warp for each row and head.
  for (int64_t n = threadIdx.x / warp_lanes; n < rows * heads; n += threads / warp_lanes) {
    const int64_t i = first + n / heads;
    const int64_t row = piece.row + i, scratch = piece.scratch + i * piece.step;
    const auto h = static_cast<int>(n % heads);
    const T* from = d_out.row(row) + h * head_dim;
    T* to = stand_in.row(scratch) + h * head_dim;
    double squared = 0;  // f64: squares of bf16 overflow f32
    float greatest = -1;
    int mine = -1;  // column of this lane's greatest element
    for (int d = lane; d < head_dim; d += warp_lanes) {
      const float x = as_float(from[d]), size = fabsf(x);
      squared += static_cast<double>(x) * x;
      if (size > greatest) {
        greatest = size;
        mine = d;
      }
    }
    const float top = warp_max(greatest);
    const unsigned owners = __ballot_sync(all_lanes, greatest == top);
    const int last = __shfl_sync(all_lanes, mine, max(0, __ffs(static_cast<int>(owners)) - 1));
    const double wanted = delta(row, h);
    const double others = warp_sum(squared) - static_cast<double>(top) * top;
    const double factor = stand_in_factor(wanted, others);
    double reached = 0;
    for (int d = lane; d < head_dim; d += warp_lanes) {
      if (d == last) continue;
      to[d] = rounded<T>(static_cast<float>(factor * as_float(from[d])));
      reached += static_cast<double>(as_float(to[d])) * as_float(from[d]);
    }
    const double lacking = wanted - warp_sum(reached);
    if (lane == last % warp_lanes)
      to[last] = rounded<T>(top > 0 ? static_cast<float>(lacking / as_float(from[last])) : 0);
    if (lane == 0) scratch_lse(scratch, h) = lse_for_backward(lse(row, h));
  }
}

template <class From, class To, int width>
__global__ void add_rows(const RowPiece* pieces, Rows<const From> partial, Rows<To> sum,
                         const From* second_partial, To* second_sum, Update update) {
  const RowPiece piece = pieces[blockIdx.y];
  if (blockIdx.z == 1) {
    partial.data = second_partial;
    sum.data = second_sum;
  }
  const auto packs = static_cast<int>(sum.cols) / width;
  const int64_t first = int64_t{blockIdx.x} * rows_of_block;
  const int64_t rows = min(int64_t{rows_of_block}, piece.length - first);
  for (int64_t n = threadIdx.x; n < rows * packs; n += threads) {
    const int64_t i = first + n / packs, c = n % packs * width;
    const auto p = *reinterpret_cast<const Pack<From, width>*>(
        partial.row(piece.scratch + i * piece.step) + c);
    auto* to = reinterpret_cast<Pack<To, width>*>(sum.row(piece.row + i) + c);
    Pack<To, width> s{};
    if (update == Update::add) s = *to;
    for (int x = 0; x < width; ++x)
      s.values[x] = rounded<To>(as_float(s.values[x]) + as_float(p.values[x]));
    *to = s;
  }
}

/// One thread per element; consecutive threads take consecutive rows.
__global__ void pack_lse(Rows<const float> lse, int64_t first, int64_t distance, int64_t rows,
                         int64_t count, float* to) {
  const int64_t at = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (at >= count) return;
  const int64_t line = at / rows, entry = line / lse.cols, head = line % lse.cols;
  to[at] = lse_for_backward(lse(first + entry * distance + at % rows, head));
}

template <class T, int width>
__global__ void fill_rows(const RowPiece* pieces, int64_t all, Rows<T> m, float value) {
  const RowPiece piece = pieces != nullptr ? pieces[blockIdx.y] : RowPiece{0, 0, all};
  Pack<T, width> fill;
  for (int x = 0; x < width; ++x) fill.values[x] = rounded<T>(value);
  const auto packs = static_cast<int>(m.cols) / width;
  const int64_t first = int64_t{blockIdx.x} * rows_of_block;
  const int64_t rows = min(int64_t{rows_of_block}, piece.length - first);
  for (int64_t n = threadIdx.x; n < rows * packs; n += threads)
    *reinterpret_cast<Pack<T, width>*>(m.row(piece.row + first + n / packs) + n % packs * width) =
        fill;
}

/// Calls f(T{}) with the element type of a matrix.
template <class F>
void with_type(DType type, F f) {
  if (type == DType::f32) return f(float{});
  GYRE_CHECK(type == DType::bf16, "a matrix of {}", name_of(type));
  f(bf16{});
}
/// Calls f(From{}, To{}) with the element types of two matrices.
template <class F>
void with_types(DType from, DType to, F f) {
  with_type(from, [&](auto first) { with_type(to, [&](auto second) { f(first, second); }); });
}

}  // namespace

void cuda_merge_rows(const DeviceRound& round, ConstMatrixRef partial,
                     MatrixView<const float> partial_lse, MatrixRef out, MatrixView<float> lse,
                     Update update, Stream& stream) {
  const int64_t heads = lse.cols;
  GYRE_CHECK(
      heads > 0 && out.cols % heads == 0 && partial.cols == out.cols && partial_lse.cols == heads,
      "{} columns merged into {} columns of {} heads", partial.cols, out.cols, heads);
  const bool packs = in_packs(partial, out.cols / heads) && in_packs(out, out.cols / heads);
  const Launch shape = {grid_of(round), threads, cuda_handle(stream),
                        heads * sizeof(MergeWeights<float>)};
  with_types(partial.type, out.type, [&]<class From, class To>(From, To) {
    launch(shape, packs ? merge_rows<From, To, 8> : merge_rows<From, To, 1>, round.pieces,
           partial.as<From>(), partial_lse, out.as<To>(), lse, update);
  });
}

void cuda_stand_in_rows(const DeviceRound& round, ConstMatrixRef d_out, MatrixView<const float> lse,
                        MatrixView<const float> delta, MatrixRef stand_in,
                        MatrixView<float> scratch_lse, Stream& stream) {
  GYRE_CHECK(lse.cols > 0 && d_out.cols % lse.cols == 0 && stand_in.cols == d_out.cols,
             "{} columns for {} columns of {} heads", stand_in.cols, d_out.cols, lse.cols);
  const Launch shape = {grid_of(round), threads, cuda_handle(stream)};
  with_types(d_out.type, stand_in.type, [&]<class From, class To>(From, To) {
    if constexpr (std::is_same_v<From, To>)
      launch(shape, stand_in_rows<From>, round.pieces, d_out.as<From>(), lse, delta,
             stand_in.as<To>(), scratch_lse);
    else
      GYRE_CHECK(false, "{} in the place of {}", name_of(stand_in.type), name_of(d_out.type));
  });
}

void cuda_add_rows(const DeviceRound& round, std::span<const RowSums> sums, Update update,
                   Stream& stream) {
  const auto& [partial, sum] = sums.front();
  const auto& [second, second_sum] = sums.back();
  GYRE_CHECK(sums.size() <= 2, "{} sums", sums.size());
  GYRE_CHECK(partial.cols == sum.cols, "{} columns added to {}", partial.cols, sum.cols);
  const bool alike = second.type == partial.type && second.cols == partial.cols &&
                     second.stride == partial.stride && second_sum.type == sum.type &&
                     second_sum.cols == sum.cols && second_sum.stride == sum.stride;
  if (!alike) {
    for (const RowSums& one : sums) cuda_add_rows(round, {&one, 1}, update, stream);
    return;
  }
  const auto packed = [](const RowSums& pair) {
    return in_packs(pair.partial, pair.sum.cols) && in_packs(pair.sum, pair.sum.cols);
  };
  const bool packs = packed(sums.front()) && packed(sums.back());
  Launch shape = {grid_of(round), threads, cuda_handle(stream)};
  shape.grid.z = static_cast<unsigned>(sums.size());
  with_types(partial.type, sum.type, [&]<class From, class To>(From, To) {
    launch(shape, packs ? add_rows<From, To, 8> : add_rows<From, To, 1>, round.pieces,
           sums.front().partial.as<From>(), sums.front().sum.as<To>(),
           sums.back().partial.as<From>().data, sums.back().sum.as<To>().data, update);
  });
}

void cuda_pack_lse(MatrixView<const float> lse, int64_t first, int64_t distance, int64_t entries,
                   int64_t rows, float* to, Stream& stream) {
  const int64_t count = entries * lse.cols * rows, blocks = ceil_div(count, int64_t{threads});
  GYRE_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "{} log-sum-exps", count);
  launch({static_cast<unsigned>(blocks), threads, cuda_handle(stream)}, pack_lse, lse, first,
         distance, rows, count, to);
}

void cuda_fill_rows(const DeviceRound& round, MatrixRef m, float value, Stream& stream) {
  constexpr int64_t max_pieces = 65535;  // limit of gridDim.y
  const bool packs = in_packs(m, m.cols);
  const int64_t count = round.pieces != nullptr ? round.count : 1;
  for (int64_t begin = 0; begin < count; begin += max_pieces) {
    DeviceRound some = {round.pieces, std::min(max_pieces, count - begin), round.longest};
    if (some.pieces != nullptr) some.pieces += begin;
    const Launch shape = {grid_of(some), threads, cuda_handle(stream)};
    with_type(m.type, [&]<class T>(T) {
      launch(shape, packs ? fill_rows<T, 8> : fill_rows<T, 1>, some.pieces, some.longest, m.as<T>(),
             value);
    });
  }
}

}  // namespace gyre
