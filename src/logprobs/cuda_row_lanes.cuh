#pragma once
// Rows of f32 or bf16 as a block of threads reads and writes them: vectors of 16 bytes of the
// widest element, on a grid of aligned addresses, so that rows may start anywhere. Vectors that are
// not wholly in the range, and all of them where two rows are not aligned alike, go element by
// element.

#include <utility>

#include "core/matrix_ref.hpp"
#include "logprobs/row_arithmetic.hpp"
#include "runtime/device_code.cuh"

namespace gyre::rows {

inline constexpr int block_threads = 256;
inline constexpr int block_warps = block_threads / warp_lanes;
/// Vectors that a thread has asked for before it looks at the first.
inline constexpr int in_flight = 4;

/// Elements of a vector of rows of these types.
template <class... T>
inline constexpr int lanes_of = sizeof...(T) == 0 ? 0 : (((sizeof(T) > 2) || ...) ? 4 : 8);

template <int lanes>
struct Lanes {
  float x[lanes];
};

/// body(0), body(1), ...: each place in an array known to the compiler, which keeps it in
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
/// Two values as bf16, rounded to nearest.
__device__ inline unsigned halves(float low, float high) {
#ifdef __CUDA_ARCH__
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return to_bf16(low).bits | static_cast<unsigned>(to_bf16(high).bits) << 16;
#endif
}

// Aligned to the vector. Nobody reads these again soon.

__device__ inline void load_lanes(const float* from, Lanes<4>& to) {
  const uint4 word = load_once(from);
  to = {{__uint_as_float(word.x), __uint_as_float(word.y), __uint_as_float(word.z),
         __uint_as_float(word.w)}};
}
__device__ inline void load_lanes(const bf16* from, Lanes<4>& to) {
  const uint2 word = __ldcs(reinterpret_cast<const uint2*>(from));
  to = {{low_half(word.x), high_half(word.x), low_half(word.y), high_half(word.y)}};
}
__device__ inline void load_lanes(const bf16* from, Lanes<8>& to) {
  const uint4 word = load_once(from);
  to = {{low_half(word.x), high_half(word.x), low_half(word.y), high_half(word.y), low_half(word.z),
         high_half(word.z), low_half(word.w), high_half(word.w)}};
}
__device__ inline void store_lanes(float* to, const Lanes<4>& from) {
  store_once(to, {__float_as_uint(from.x[0]), __float_as_uint(from.x[1]),
                  __float_as_uint(from.x[2]), __float_as_uint(from.x[3])});
}
__device__ inline void store_lanes(bf16* to, const Lanes<4>& from) {
  __stcs(reinterpret_cast<uint2*>(to),
         make_uint2(halves(from.x[0], from.x[1]), halves(from.x[2], from.x[3])));
}
__device__ inline void store_lanes(bf16* to, const Lanes<8>& from) {
  store_once(to, {halves(from.x[0], from.x[1]), halves(from.x[2], from.x[3]),
                  halves(from.x[4], from.x[5]), halves(from.x[6], from.x[7])});
}
__device__ inline void store_one(float* to, float x) {
  *to = x;
}
__device__ inline void store_one(bf16* to, float x) {
  *to = to_bf16(x);
}

/// Columns [begin, end) of a row on the grid of its aligned vectors.
template <int lanes>
struct Grid {
  int64_t begin, end;
  int64_t first;  ///< column of the first vector: begin, or some columns before
  bool aligned;   ///< whether all of the rows are, on that grid

  template <class T, class... More>
  __device__ Grid(int64_t begin_, int64_t end_, const T* row, const More*... more)
      : begin(begin_), end(end_) {
    const int64_t past = past_alignment(row + begin, sizeof(T), lanes);
    first = begin - past;
    aligned = (... && (past_alignment(more + begin, sizeof(More), lanes) == past));
  }
  /// The same vectors of fewer columns.
  __device__ Grid up_to(int64_t columns) const {
    Grid fewer = *this;
    fewer.end = min(end, columns);
    return fewer;
  }
  __device__ bool whole(int64_t at) const { return aligned && at >= begin && at + lanes <= end; }

  /// Bit i: whether the i-th element of the vector at column `at` is in [begin, end).
  __device__ unsigned valid(int64_t at) const {
    unsigned bits = 0;
    for (int i = 0; i < lanes; ++i) bits |= (at + i >= begin && at + i < end ? 1U : 0U) << i;
    return bits;
  }

  /// The elements of the vector at column `at`; -inf outside of [begin, end).
  template <class T>
  __device__ Lanes<lanes> load(const T* row, int64_t at) const {
    Lanes<lanes> values;
    if (whole(at)) {
      load_lanes(row + at, values);
    } else {
      for (int i = 0; i < lanes; ++i)
        values.x[i] = at + i >= begin && at + i < end ? to_float(row[at + i]) : minus_infinity;
    }
    return values;
  }
  template <class T>
  __device__ void store(T* row, int64_t at, const Lanes<lanes>& values) const {
    if (whole(at)) {
      store_lanes(row + at, values);
    } else {
      for (int i = 0; i < lanes; ++i)
        if (at + i >= begin && at + i < end) store_one(row + at + i, values.x[i]);
    }
  }
};

/// body(values, column) for the vectors of columns [begin, end) that are this thread's.
template <class T, class Body>
__device__ void for_each_vector(const T* row, int64_t begin, int64_t end, const Body& body) {
  constexpr int lanes = lanes_of<T>;
  const Grid<lanes> grid(begin, end, row);
  const auto threads = static_cast<int64_t>(blockDim.x);
  const int64_t step = threads * lanes;
  for (int64_t at = grid.first + threadIdx.x * lanes; at < end; at += in_flight * step) {
    Lanes<lanes> values[in_flight];
    for (int k = 0; k < in_flight; ++k)
      if (at + k * step < end) values[k] = grid.load(row, at + k * step);
    for (int k = 0; k < in_flight; ++k)
      if (at + k * step < end) body(values[k], at + k * step);
  }
}

/// The sum over the threads of the block, on all of them; `shared` [warps].
template <class T>
__device__ T block_sum(T mine, T* shared) {
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes;
  mine = warp_sum(mine);
  __syncthreads();  // what was there before has been read
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

/// The sums of the block's threads together, on all of them.
template <bool weighted>
__device__ PartSums block_sums(const ThreadSums<weighted>& mine) {
  __shared__ float maxima[block_warps];
  __shared__ double sums[block_warps];
  const float max = block_max(mine.max, maxima);
  PartSums part = mine.part(max);
  part.sum = block_sum(part.sum, sums);
  if (weighted) part.weighted = block_sum(part.weighted, sums);
  return part;
}

/// A grid of so many blocks.
inline unsigned blocks_of(int64_t count) {
  GYRE_CHECK(count <= std::numeric_limits<int32_t>::max(), "{} blocks of one launch", count);
  return static_cast<unsigned>(count);
}

/// A view of known type, and that type.
template <class View, class T>
struct Elements {
  using Type = T;
  View view;
};
/// body(Elements) of the matrix, whatever its type.
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

/// A block of a launch over the parts of rows.
struct PartOfRow {
  int64_t row, part, begin, end;

  __device__ PartOfRow(int64_t parts, int64_t columns, int64_t columns_of_part)
      : row(static_cast<int64_t>(blockIdx.x) / parts),
        part(static_cast<int64_t>(blockIdx.x) % parts),
        begin(part * columns_of_part),
        end(min(begin + columns_of_part, columns)) {}
};

}  // namespace gyre::rows
