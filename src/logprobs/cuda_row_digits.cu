// Sums by digits, counts, and ties of single rows. Sums are of integers: their order does not
// matter.

#include "logprobs/cuda_row_lanes.cuh"
#include "logprobs/cuda_row_launch.hpp"

namespace gyre::rows {
namespace {

// What CUDA's atomics on 64 bits are declared for.
using Sum = unsigned long long;
static_assert(sizeof(Sum) == sizeof(int64_t));

template <class T>
__global__ void __launch_bounds__(block_threads)
    masses_of_parts(const T* logits, int64_t stride, int64_t columns, int64_t parts,
                    const MassRow* rows, int64_t* masses) {
  // Neighbours often have the same bucket: each warp has a table of its own.
  __shared__ Sum tables[block_warps][digit_sums];
  const PartOfRow mine(parts, columns, part_columns);
  const MassRow query = rows[mine.row];
  for (int64_t i = threadIdx.x; i < block_warps * digit_sums; i += block_threads)
    tables[i / digit_sums][i % digit_sums] = 0;
  __syncthreads();
  Sum* table = tables[threadIdx.x / warp_lanes];
  for_each_vector(logits + query.row * stride, mine.begin, mine.end,
                  [&](const auto& values, int64_t) {
                    for (const float z : values.x) {
                      const int64_t bucket = bucket_of(z, dtype_of<T>, query.scan);
                      if (!query.scan.all && bucket >= digit_buckets) continue;
                      const Sum mass = mass_of(z, query.scan);
                      if (mass != 0) atomicAdd(&table[bucket], mass);
                    }
                  });
  __syncthreads();
  for (int64_t i = threadIdx.x; i < digit_sums; i += block_threads) {
    Sum sum = 0;
    for (int w = 0; w < block_warps; ++w) sum += tables[w][i];
    if (sum != 0) atomicAdd(reinterpret_cast<Sum*>(masses) + mine.row * digit_sums + i, sum);
  }
}

template <class T>
__global__ void __launch_bounds__(block_threads)
    counts_of_parts(const T* logits, int64_t stride, int64_t parts, const ColumnQuery* queries,
                    Sum* counts) {
  __shared__ int shared[block_warps];
  const ColumnQuery query = queries[static_cast<int64_t>(blockIdx.x) / parts];
  const PartOfRow mine(parts, query.end, part_columns);
  int above = 0, equal = 0;
  // Elements outside of the range come as -inf, which is nobody's.
  const int64_t begin = max(mine.begin, query.begin);
  if (begin < mine.end)
    for_each_vector(logits + query.row * stride, begin, mine.end,
                    [&](const auto& values, int64_t column) {
                      for (int i = 0; i < lanes_of<T>; ++i) {
                        if (column + i < begin || column + i >= mine.end) continue;
                        above += values.x[i] > query.value ? 1 : 0;
                        equal += values.x[i] == query.value ? 1 : 0;
                      }
                    });
  above = block_sum(above, shared);
  equal = block_sum(equal, shared);
  if (threadIdx.x != 0) return;
  if (above != 0) atomicAdd(&counts[2 * mine.row], static_cast<Sum>(above));
  if (equal != 0) atomicAdd(&counts[2 * mine.row + 1], static_cast<Sum>(equal));
}

/// One block a query: tiles from the end until the one with the element, then it alone.
template <class T>
__global__ void __launch_bounds__(block_threads)
    ties_of_rows(const T* logits, int64_t stride, int64_t columns, const TieQuery* queries,
                 int64_t* found) {
  __shared__ int shared[block_warps];
  constexpr int64_t tile = 16 * block_threads;
  const TieQuery query = queries[blockIdx.x];
  const T* row = logits + query.row * stride;
  const auto equals = [&](int64_t column) {
    return column >= 0 && to_float(row[column]) == query.value ? 1 : 0;
  };
  if (threadIdx.x == 0) found[blockIdx.x] = -1;
  int64_t n = query.n, end = columns;
  for (; end > 0; end -= tile) {
    int mine = 0;
    for (int64_t c = end - 1 - threadIdx.x; c >= max(int64_t{0}, end - tile); c -= block_threads)
      mine += equals(c);
    const int count = block_sum(mine, shared);
    if (count >= n) break;
    n -= count;
  }
  for (; end > 0; end -= block_threads) {
    // Thread i has the i-th last column, so that those of lower threads come first.
    const int64_t column = end - 1 - threadIdx.x;
    const int mine = equals(column), lane = static_cast<int>(threadIdx.x) % warp_lanes;
    const int count = __syncthreads_count(mine);
    if (count < n) {
      n -= count;
      continue;
    }
    const unsigned warp = __ballot_sync(all_lanes, mine);
    if (lane == 0) shared[threadIdx.x / warp_lanes] = __popc(warp);
    __syncthreads();
    int64_t before = __popc(warp & ((1U << lane) - 1));
    for (unsigned w = 0; w < threadIdx.x / warp_lanes; ++w) before += shared[w];
    if (mine != 0 && before + 1 == n) found[blockIdx.x] = column;
    return;
  }
}

}  // namespace

void launch_masses(CUstream_st* stream, ConstMatrixRef logits, int64_t columns, const MassRow* rows,
                   int64_t count, int64_t* masses) {
  const int64_t parts = parts_of(columns, part_columns);
  with_elements(logits, [&](auto z) {
    launch({blocks_of(count * parts), block_threads, stream},
           masses_of_parts<typename decltype(z)::Type>, z.view.data, z.view.stride, columns, parts,
           rows, masses);
  });
}

void launch_counts(CUstream_st* stream, ConstMatrixRef logits, const ColumnQuery* queries,
                   int64_t count, ColumnCounts* counts) {
  static_assert(sizeof(ColumnCounts) == 2 * sizeof(Sum));
  const int64_t parts = parts_of(logits.cols, part_columns);
  with_elements(logits, [&](auto z) {
    launch({blocks_of(count * parts), block_threads, stream},
           counts_of_parts<typename decltype(z)::Type>, z.view.data, z.view.stride, parts, queries,
           reinterpret_cast<Sum*>(counts));
  });
}

void launch_ties(CUstream_st* stream, ConstMatrixRef logits, int64_t columns,
                 const TieQuery* queries, int64_t count, int64_t* found) {
  with_elements(logits, [&](auto z) {
    launch({blocks_of(count), block_threads, stream}, ties_of_rows<typename decltype(z)::Type>,
           z.view.data, z.view.stride, columns, queries, found);
  });
}

}  // namespace gyre::rows
