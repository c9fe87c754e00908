#pragma once
// Code that the kernels of a recurrence share. Arrays [C, ...] of a chunk of n <= C tokens have n
// rows that are written and read.

#include "recurrence/cuda_chunk.hpp"
#include "recurrence/device_scratch.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"

namespace gyre {

inline constexpr int chunk_threads = 256, chunk_warps = chunk_threads / warp_lanes;
inline constexpr int chunk_tokens = recurrence_chunk;
inline constexpr int tile_columns = 32;
/// Strides of rows in shared memory: rows of a column are in different banks.
inline constexpr int tile_stride = tile_columns + 1, square_stride = chunk_tokens + 1;
inline constexpr int tile_elements = chunk_tokens * tile_stride;
inline constexpr int square_elements = chunk_tokens * square_stride;
/// Shared memory of a block that computes gradients (cuda_gradients.cu).
inline constexpr int64_t gradient_bytes =
    (2 * square_elements + 7 * tile_elements + 4 * chunk_tokens) * sizeof(float);

__device__ inline int thread_index() {
  return static_cast<int>(threadIdx.x);
}

__device__ inline float load(const ElementRows& rows, int64_t row, int64_t column) {
  const int64_t at = row * rows.stride + column;
  return rows.narrow ? to_float(reinterpret_cast<const bf16*>(rows.data)[at])
                     : reinterpret_cast<const float*>(rows.data)[at];
}
__device__ inline void store(const ElementRows& rows, int64_t row, int64_t column, float x) {
  const int64_t at = row * rows.stride + column;
  if (rows.narrow)
    reinterpret_cast<bf16*>(rows.data)[at] = to_bf16(x);
  else
    reinterpret_cast<float*>(rows.data)[at] = x;
}

/// One chunk of one head of values.
struct HeadChunk {
  const ChunkArgs& args;
  int head, tokens;
  int64_t begin, slot;  ///< the first token in the run; the place in the scratch

  /// Head `place` of the launch.
  __device__ HeadChunk(const ChunkArgs& args_, int place, int64_t chunk)
      : args(args_),
        head(args_.first_head + place),
        tokens(static_cast<int>(min(int64_t{chunk_tokens}, args_.tokens - chunk * chunk_tokens))),
        begin(chunk * chunk_tokens),
        slot(place * args_.chunks + chunk) {}

  __device__ const ElementRows& rows(RecurrenceArray array) const {
    return args.arrays[static_cast<int>(array)];
  }
  /// Element c of a query or a key; 0 beyond it.
  __device__ float key(RecurrenceArray array, int t, int c) const {
    return c < args.keys ? load(rows(array), begin + t, head / args.group * args.keys + c) : 0;
  }
  /// Element e of a value, or of the output; 0 beyond it.
  __device__ float value(RecurrenceArray array, int t, int e) const {
    return e < args.values ? load(rows(array), begin + t, int64_t{head} * args.values + e) : 0;
  }
  __device__ void store_value(RecurrenceArray array, int t, int e, float x) const {
    if (e < args.values) store(rows(array), begin + t, int64_t{head} * args.values + e, x);
  }
  __device__ float decay(int t, int c) const {
    const int64_t column = args.channel_decay ? int64_t{head} * args.keys + c : head;
    return c < args.keys ? expf(load(rows(RecurrenceArray::g), begin + t, column)) : 1;
  }
  __device__ float beta(int t) const {
    return args.delta ? load(rows(RecurrenceArray::beta), begin + t, head) : 1;
  }
  __device__ float* square(float* scratch) const {
    return scratch + slot * chunk_tokens * chunk_tokens;
  }
  __device__ float* state(float* scratch) const { return scratch + slot * args.keys * args.values; }
  __device__ float* of_values(float* scratch) const {
    return scratch + slot * chunk_tokens * args.values;
  }
  __device__ float* of_keys(float* scratch) const {
    return scratch + slot * chunk_tokens * args.keys;
  }
};

/// Calls body(t, j) for the elements of `rows` rows of a tile, each by one thread.
template <class Body>
__device__ void for_tile(int rows, Body body) {
  for (int i = thread_index(); i < rows * tile_columns; i += chunk_threads)
    body(i / tile_columns, i % tile_columns);
}

/// out(i, j, Σ_k a(i, k) b(k, j)) for i < rows, j < 32, k < depth. Products of the same number of
/// rows have the same thread for an element.
template <class A, class B, class Out>
__device__ void product(int rows, int depth, A a, B b, Out out) {
  constexpr int across = 16, down = chunk_threads / across;
  constexpr int row_parts = chunk_tokens / down, column_parts = tile_columns / across;
  const int x = thread_index() % across, y = thread_index() / across;
  for (int first = y; first < rows; first += chunk_tokens) {
    float sums[row_parts][column_parts] = {};
    for (int k = 0; k < depth; ++k) {
      float left[row_parts], right[column_parts];
      GYRE_UNROLL for (int r = 0; r < row_parts; ++r) left[r] =
          a(min(first + r * down, rows - 1), k);
      GYRE_UNROLL for (int c = 0; c < column_parts; ++c) right[c] = b(k, x + c * across);
      GYRE_UNROLL for (int r = 0; r < row_parts; ++r)
          GYRE_UNROLL for (int c = 0; c < column_parts; ++c) sums[r][c] += left[r] * right[c];
    }
    GYRE_UNROLL for (int r = 0; r < row_parts; ++r)
        GYRE_UNROLL for (int c = 0; c < column_parts; ++c) if (first + r * down < rows)
            out(first + r * down, x + c * across, sums[r][c]);
  }
}

/// Matrices in shared memory as arguments of a product.
struct Shared {
  const float* data;
  int stride;
  __device__ float operator()(int i, int j) const { return data[i * stride + j]; }
};
struct SharedTransposed {
  const float* data;
  int stride;
  __device__ float operator()(int i, int j) const { return data[j * stride + i]; }
};

/// to [C, C] <- a tile of the scratch.
__device__ inline void load_square(float* to, const float* from, int tokens) {
  for (int i = thread_index(); i < tokens * chunk_tokens; i += chunk_threads) {
    const int t = i / chunk_tokens, j = i % chunk_tokens;
    if (j < tokens) to[t * square_stride + j] = from[i];
  }
}

inline dim3 grid_of(int64_t blocks, const ChunkArgs& args) {
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(args.heads), 1};
}

}  // namespace gyre
