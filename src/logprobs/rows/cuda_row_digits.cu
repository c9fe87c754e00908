// The passes of row_digits.hpp on a device: digit sums, counts of columns, and the n-th last of
// equal elements. All sums are of integers, so their order does not matter.

#include "logprobs/rows/cuda_row_lanes.cuh"
#include "logprobs/rows/cuda_row_launch.hpp"

namespace gyre::rows {
namespace {

// Type of CUDA's 64-bit atomics.
using Sum = unsigned long long;
static_assert(sizeof(Sum) == sizeof(int64_t));

/// Adds `mass` to a sum in two words of shared memory, modulo 2^64. A 64-bit atomic in shared
/// memory would be a compare-and-swap loop; a 32-bit one is a single instruction.
__device__ void add_mass(unsigned& low, unsigned& high, Sum mass) {
  const auto part = static_cast<unsigned>(mass);
  const unsigned before = atomicAdd(&low, part);
  const unsigned rest = static_cast<unsigned>(mass >> 32) + (before + part < before ? 1U : 0U);
  if (rest != 0) atomicAdd(&high, rest);
}

template <class T>
__global__ void __launch_bounds__(block_threads)
    masses_of_parts(const T* logits, int64_t stride, int64_t columns, int64_t parts,
                    const MassRow* rows, int64_t* masses) {
  // Neighbouring elements often share a bucket, so each warp has its own table.
  __shared__ unsigned lows[block_warps][digit_sums], highs[block_warps][digit_sums];
  const PartOfRow mine(parts, columns, part_columns);
  const MassRow query = rows[mine.row];
  for (int64_t i = threadIdx.x; i < block_warps * digit_sums; i += block_threads)
    lows[i / digit_sums][i % digit_sums] = highs[i / digit_sums][i % digit_sums] = 0;
  __syncthreads();
  unsigned *low = lows[threadIdx.x / warp_lanes], *high = highs[threadIdx.x / warp_lanes];
  const T* row = logits + query.row * stride;
  const Grid<lanes_of<T>> grid(mine.begin, mine.end, row);
  for_each_vector(
      grid,
      [&](Place, const auto& values) {
        for (const float z : values.x) {
          const int64_t bucket = bucket_of(z, dtype_of<T>, query.scan);
          if (!query.scan.all && bucket >= digit_buckets) continue;
          const Sum mass = mass_of(z, query.scan);
          if (mass != 0) add_mass(low[bucket], high[bucket], mass);
        }
      },
      row);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < digit_sums; i += block_threads) {
    Sum sum = 0;
    for (int w = 0; w < block_warps; ++w) sum += (static_cast<Sum>(highs[w][i]) << 32) + lows[w][i];
    if (sum != 0) atomicAdd(reinterpret_cast<Sum*>(masses) + mine.row * digit_sums + i, sum);
  }
}

template <class T>
__global__ void __launch_bounds__(block_threads)
    counts_of_parts(const T* logits, int64_t stride, int64_t parts, const ColumnQuery* queries,
                    Sum* counts) {
  __shared__ int shared[block_warps];
  const ColumnQuery query = queries[blockIdx.x / parts];
  const PartOfRow mine(parts, query.end, part_columns);
  int above = 0, equal = 0;
  const int64_t begin = max(mine.begin, query.begin);
  if (begin < mine.end) {
    const T* row = logits + query.row * stride;
    const Grid<lanes_of<T>> grid(begin, mine.end, row);
    for_each_vector(
        grid,
        [&](Place at, const auto& values) {
          // Elements outside the range are read as -inf, which may equal the query's value.
          const unsigned valid = at.whole ? ~0U : grid.valid(at.column);
          for (int i = 0; i < lanes_of<T>; ++i) {
            above += (valid >> i & 1U) != 0 && values.x[i] > query.value ? 1 : 0;
            equal += (valid >> i & 1U) != 0 && values.x[i] == query.value ? 1 : 0;
          }
        },
        row);
  }
  above = block_sum(above, shared);
  equal = block_sum(equal, shared);
  if (threadIdx.x != 0) return;
  if (above != 0) atomicAdd(&counts[2 * mine.row], static_cast<Sum>(above));
  if (equal != 0) atomicAdd(&counts[2 * mine.row + 1], static_cast<Sum>(equal));
}

/// One block per query counts equal elements from the end of the row, by tile, then within one.
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
    // Thread i has the i-th last column, so that lower threads hold later columns.
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
