#pragma once
// Access of a thread block to rows of f32 or bf16: 16-byte vectors of the widest element type, on a
// grid of aligned addresses, so that rows may start anywhere. Vectors partly outside the range, and
// all vectors if two rows are not aligned alike, are accessed element by element.

#include <type_traits>
#include <utility>

#include "core/matrix_ref.hpp"
#include "logprobs/rows/row_arithmetic.hpp"
#include "runtime/device_code.cuh"

namespace gyre::rows {

inline constexpr int block_threads = 256;
inline constexpr int block_warps = block_threads / warp_lanes;
/// Vectors that a thread has in flight, over all rows that it reads. At 40 to 80 registers per
/// thread, these are 96 to 48 KiB per multiprocessor (65536 registers); 40 KiB where a bf16 vector
/// is 8 bytes, beside a 16-byte vector of f32.
inline constexpr int in_flight = 4;

/// Elements per vector, for rows of these types.
template <class... T>
inline constexpr int lanes_of = sizeof...(T) == 0 ? 0 : (((sizeof(T) > 2) || ...) ? 4 : 8);

template <int lanes>
struct Lanes {
  float x[lanes];
};

/// Calls body(0), body(1), ... with indices known at compile time, so that arrays stay in
/// registers.
template <int count, class Body>
__device__ void unrolled(const Body& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body(i), ...);
  }
  (std::make_integer_sequence<int, count>());
}

__device__ inline float low_half(unsigned word) {
  return __uint_as_float(word << 16);
}
__device__ inline float high_half(unsigned word) {
  return __uint_as_float(word & 0xffff0000U);
}
/// A vector in memory: 16 bytes, or 8 for bf16 that is processed together with f32.
template <class T, int lanes>
using Words = std::conditional_t<sizeof(T) * lanes == 16, uint4, uint2>;

template <int lanes, class T>
__device__ Words<T, lanes> load_words(const T* from) {
  return __ldcs(reinterpret_cast<const Words<T, lanes>*>(from));
}
template <class T>
__device__ auto lanes_in(uint4 words) {
  if constexpr (sizeof(T) == 4)
    return Lanes<4>{{__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                     __uint_as_float(words.w)}};
  else
    return Lanes<8>{{low_half(words.x), high_half(words.x), low_half(words.y), high_half(words.y),
                     low_half(words.z), high_half(words.z), low_half(words.w), high_half(words.w)}};
}
template <class T>
__device__ Lanes<4> lanes_in(uint2 words) {
  return {{low_half(words.x), high_half(words.x), low_half(words.y), high_half(words.y)}};
}
__device__ inline void store_lanes(float* to, const Lanes<4>& from) {
  store_once(to, {__float_as_uint(from.x[0]), __float_as_uint(from.x[1]),
                  __float_as_uint(from.x[2]), __float_as_uint(from.x[3])});
}
__device__ inline void store_lanes(bf16* to, const Lanes<4>& from) {
  __stcs(reinterpret_cast<uint2*>(to),
         make_uint2(pack_bf16(from.x[0], from.x[1]), pack_bf16(from.x[2], from.x[3])));
}
__device__ inline void store_lanes(bf16* to, const Lanes<8>& from) {
  store_once(to, {pack_bf16(from.x[0], from.x[1]), pack_bf16(from.x[2], from.x[3]),
                  pack_bf16(from.x[4], from.x[5]), pack_bf16(from.x[6], from.x[7])});
}
__device__ inline void store_one(float* to, float x) {
  *to = x;
}
__device__ inline void store_one(bf16* to, float x) {
  *to = to_bf16(x);
}

/// Vectors of a row that a thread has loaded ahead. ask() does not wait; get() waits for the load.
template <class T, int lanes, int count>
struct Asked {
  const T* row;
  Words<T, lanes> words[count];

  /// Reads nothing if `wanted` is false.
  __device__ void ask(int k, int64_t at, bool wanted) {
    words[k] = wanted ? load_words<lanes>(row + at) : Words<T, lanes>{};
  }
  __device__ Lanes<lanes> get(int k) const { return lanes_in<T>(words[k]); }
};

/// Column of a vector, and whether it is accessed as a whole.
struct Place {
  int64_t column;
  bool whole;
};

/// Columns [begin, end) of a row on the grid of its aligned vectors.
template <int lanes>
struct Grid {
  int64_t begin, end;
  int64_t first;  ///< column of the first vector: begin, or up to a vector before it
  bool aligned;   ///< whether all rows are aligned on this grid

  template <class T, class... More>
  __device__ Grid(int64_t begin_, int64_t end_, const T* row, const More*... more)
      : begin(begin_), end(end_) {
    const int64_t past = past_alignment(row + begin, sizeof(T), lanes);
    first = begin - past;
    aligned = (... && (past_alignment(more + begin, sizeof(More), lanes) == past));
  }
  __device__ bool whole(int64_t at) const { return aligned && at >= begin && at + lanes <= end; }

  /// Bit i: whether the i-th element of the vector at column `at` is in [begin, end).
  __device__ unsigned valid(int64_t at) const {
    unsigned bits = 0;
    for (int i = 0; i < lanes; ++i) bits |= (at + i >= begin && at + i < end ? 1U : 0U) << i;
    return bits;
  }

  /// Loads the vector at column `at` element by element; -inf outside [begin, end).
  template <class T>
  __device__ Lanes<lanes> elements(const T* row, int64_t at) const {
    Lanes<lanes> values;
    for (int i = 0; i < lanes; ++i)
      values.x[i] = at + i >= begin && at + i < end ? to_float(row[at + i]) : minus_infinity;
    return values;
  }
  template <class T>
  __device__ void store(T* row, Place at, const Lanes<lanes>& values) const {
    if (at.whole) {
      store_lanes(row + at.column, values);
    } else {
      for (int i = 0; i < lanes; ++i)
        if (at.column + i >= begin && at.column + i < end)
          store_one(row + at.column + i, values.x[i]);
    }
  }
};

/// Loop of for_each_vector with `count` vectors per row in flight. A load is issued just before the
/// body of the vector whose place it takes. When all loads stood first in the loop, the assembler
/// moved them down between the bodies; it moves none into the next iteration.
template <int count, int lanes, class Body, class... T>
__device__ void for_each_asked(const Grid<lanes>& grid, const Body& body,
                               Asked<T, lanes, count>... rows) {
  constexpr int64_t step = block_threads * lanes;
  int64_t at = grid.first + threadIdx.x * lanes;
  const auto one_by_one = [&](int64_t end) {
    for (; at < end; at += step) body(Place{at, false}, grid.elements(rows.row, at)...);
  };
  // `certain`: the vector is inside the range, so no comparison is needed.
  const auto ask = [&](int k, int64_t column, bool certain) {
    (rows.ask(k, column, certain || column + lanes <= grid.end), ...);
  };
  // Iterates while all vectors `more` columns ahead of an iteration are inside the range.
  const auto rounds = [&](int64_t more, bool certain) {
    for (; at + more + (count - 1) * step + lanes <= grid.end; at += count * step)
      unrolled<count>([&](int k) {
        const auto turn = [&](const auto&... values) {
          ask(k, at + (count + k) * step, certain);
          body(Place{at + k * step, true}, values...);
        };
        turn(rows.get(k)...);
      });
  };
  // With aligned rows, the first vector may begin before the range and the last end after it.
  one_by_one(grid.aligned ? grid.begin : grid.end);
  unrolled<count>([&](int k) { ask(k, at + k * step, false); });
  rounds(count * step, true);
  rounds(0, false);
  unrolled<count - 1>([&](int k) {
    if (at + lanes > grid.end) return;
    body(Place{at, true}, rows.get(k)...);
    at += step;
  });
  one_by_one(grid.end);
}

/// Calls body(Place, values of each row...) for this thread's vectors of the grid, in order; values
/// outside the grid's columns are -inf. Prefetched vectors are later ones of the same thread, so a
/// body may write to its own elements.
template <int lanes, class Body, class... T>
__device__ void for_each_vector(const Grid<lanes>& grid, const Body& body, const T*... rows) {
  constexpr int count = in_flight / static_cast<int>(sizeof...(T));
  for_each_asked<count>(grid, body, Asked<T, lanes, count>{rows, {}}...);
}

/// Sum over the threads of the block, returned to all of them; `shared` [warps].
template <class T>
__device__ T block_sum(T mine, T* shared) {
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes;
  mine = warp_sum(mine);
  __syncthreads();  // earlier contents have been read
  if (threadIdx.x % warp_lanes == 0) shared[warp] = mine;
  __syncthreads();
  T sum = shared[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / warp_lanes; ++w) sum += shared[w];
  return sum;
}
__device__ inline float block_max(float mine, float* shared) {
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes;
  mine = warp_max(mine);
  __syncthreads();
  if (threadIdx.x % warp_lanes == 0) shared[warp] = mine;
  __syncthreads();
  float max = shared[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / warp_lanes; ++w) max = fmaxf(max, shared[w]);
  return max;
}

/// Combines the sums of a warp's lanes; all lanes get the result. `scale` as in move_sums.
template <bool weighted, bool total>
__device__ PartSums warp_sums(PartSums mine, float scale) {
  const float top = warp_max(mine.max);
  move_sums(mine.max, top, scale, mine.sum, mine.weighted);
  return {top, warp_sum(mine.sum), weighted ? warp_sum(mine.weighted) : 0,
          total ? warp_sum(mine.total) : 0};
}

/// Combines the sums of the block's threads, on its first warp: first within each warp, then over
/// the warps. A kernel may call it only once.
template <bool total = false, bool weighted>
__device__ PartSums block_sums(const ThreadSums<weighted>& mine) {
  __shared__ float maxima[block_warps];
  __shared__ double sums[block_warps], weighted_sums[block_warps], totals[block_warps];
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes;
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  PartSums part = warp_sums<weighted, total>(mine.part(mine.max), mine.scale);
  if (lane == 0) {
    maxima[warp] = part.max;
    sums[warp] = part.sum;
    weighted_sums[warp] = part.weighted;
    totals[warp] = part.total;
  }
  __syncthreads();
  if (warp > 0) return part;
  part = {};
  if (lane < static_cast<int>(blockDim.x) / warp_lanes)
    part = {maxima[lane], sums[lane], weighted_sums[lane], totals[lane]};
  return warp_sums<weighted, total>(part, mine.scale);
}

inline unsigned blocks_of(int64_t count) {
  GYRE_CHECK(count <= std::numeric_limits<int32_t>::max(), "{} blocks of one launch", count);
  return static_cast<unsigned>(count);
}

/// A view with its element type.
template <class View, class T>
struct Elements {
  using Type = T;
  View view;
};
/// Calls body(Elements) with the matrix's element type.
template <class Byte, class Body>
void with_elements(const BasicMatrixRef<Byte>& matrix, const Body& body) {
  if (matrix.type == DType::f32) {
    const auto view = matrix.template as<float>();
    body(Elements<std::remove_const_t<decltype(view)>, float>{view});
  } else {
    const auto view = matrix.template as<bf16>();
    body(Elements<std::remove_const_t<decltype(view)>, bf16>{view});
  }
}

/// Part of a row that a block processes.
struct PartOfRow {
  int64_t row, part, begin, end;

  __device__ PartOfRow(int64_t parts, int64_t columns, int64_t columns_of_part)
      : row(blockIdx.x / parts),
        part(blockIdx.x % parts),
        begin(part * columns_of_part),
        end(min(begin + columns_of_part, columns)) {}
};

/// Prefetches the vectors of columns [part.begin, part.end) of `row` that threads load first.
template <class T>
__device__ void prefetch_first(const T* row, const PartOfRow& part) {
  constexpr int64_t step = block_threads * lanes_of<T>;
  const int64_t first = part.begin + threadIdx.x * lanes_of<T>;
  for (int k = 0; k < in_flight; ++k)
    if (first + k * step < part.end) prefetch_line(row + first + k * step);
}

/// Row `row` of a matrix in device memory.
template <class T>
__device__ T* row_of(const MatrixView<T>& matrix, int64_t row) {
  return matrix.data + row * matrix.stride;
}

}  // namespace gyre::rows
