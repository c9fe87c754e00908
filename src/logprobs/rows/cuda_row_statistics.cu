// Row partials: a block sums a part of a row, then one thread sums the parts of a row.

#include "logprobs/rows/cuda_row_lanes.cuh"
#include "logprobs/rows/cuda_row_launch.hpp"

namespace gyre::rows {
namespace {

/// A block ends with its sums: one that waited for others would keep the next from loading.
template <class T, bool weighted, bool total>
__global__ void __launch_bounds__(block_threads)
    partials_of_parts(const T* logits, int64_t stride, int64_t columns, int64_t parts,
                      RowScale scale, PartSums* out) {
  const PartOfRow mine(parts, columns, part_columns);
  ThreadSums<weighted> sums{base_2(scale[mine.row])};
  const T* row = logits + mine.row * stride;
  const Grid<lanes_of<T>> grid(mine.begin, mine.end, row);
  for_each_vector(
      grid,
      [&](Place at, const auto& values) {
        sums.add(values.x);
        if constexpr (total) sums.add_total(values.x, at.whole ? ~0U : grid.valid(at.column));
      },
      row);
  const PartSums part = block_sums<total>(sums);
  if (threadIdx.x == 0) out[blockIdx.x] = part;
}

__global__ void __launch_bounds__(block_threads)
    partials_of_rows(const PartSums* sums, int64_t rows, int64_t parts, RowScale scale,
                     bool weighted, SoftmaxPartial* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * block_threads + threadIdx.x;
  if (row >= rows) return;
  out[row] = partials_of(sums + row * parts, parts, base_2(scale[row]), weighted);
}

// The bound of 3 blocks leaves registers for all loads in flight; else bf16 is loaded pair by pair.
template <class S, class T>
__global__ void __launch_bounds__(block_threads, 3)
    cross_partials_of_parts(const S* students, int64_t student_stride, const T* teachers,
                            int64_t teacher_stride, int64_t columns, int64_t parts,
                            CrossSums* out) {
  __shared__ float maxima[block_warps];
  __shared__ double shared[block_warps];
  const PartOfRow mine(parts, columns, part_columns);
  const S* student = students + mine.row * student_stride;
  const T* teacher = teachers + mine.row * teacher_stride;
  const Grid<lanes_of<S, T>> grid(mine.begin, mine.end, student, teacher);
  CrossSums sums;
  for_each_vector(
      grid, [&](Place, const auto& s, const auto& t) { sums.add(s.x, t.x); }, student, teacher);
  sums.raise(block_max(sums.student_max, maxima), block_max(sums.teacher_max, maxima));
  sums.student_sum = block_sum(sums.student_sum, shared);
  sums.teacher_sum = block_sum(sums.teacher_sum, shared);
  sums.cross = block_sum(sums.cross, shared);
  if (threadIdx.x == 0) out[blockIdx.x] = sums;
}

__global__ void __launch_bounds__(block_threads)
    cross_partials_of_rows(const CrossSums* sums, int64_t rows, int64_t parts, CrossPartial* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * block_threads + threadIdx.x;
  if (row >= rows) return;
  CrossSums total;
  for (int64_t p = 0; p < parts; ++p) total.add(sums[row * parts + p]);
  out[row] = partials_of(total);
}

template <class T>
__global__ void __launch_bounds__(block_threads)
    sums_of_parts(const T* values, int64_t stride, int64_t columns, int64_t parts, double* out) {
  __shared__ double shared[block_warps];
  const PartOfRow mine(parts, columns, part_columns);
  const T* row = values + mine.row * stride;
  const Grid<lanes_of<T>> grid(mine.begin, mine.end, row);
  double sum = 0;
  for_each_vector(
      grid,
      [&](Place at, const auto& vector) {
        const unsigned valid = at.whole ? ~0U : grid.valid(at.column);
        for (int i = 0; i < lanes_of<T>; ++i)
          if ((valid >> i & 1U) != 0) sum += vector.x[i];
      },
      row);
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(block_threads)
    sums_of_rows(const double* sums, int64_t rows, int64_t parts, double* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * block_threads + threadIdx.x;
  if (row >= rows) return;
  double total = 0;
  for (int64_t p = 0; p < parts; ++p) total += sums[row * parts + p];
  out[row] = total;
}

}  // namespace

void launch_part_sums(CUstream_st* stream, ConstMatrixRef logits, const RowScan& scan,
                      PartSums* parts) {
  const int64_t count = parts_of(scan.columns, part_columns);
  const Launch shape{blocks_of(logits.rows * count), block_threads, stream};
  with_elements(logits, [&](auto z) {
    using T = typename decltype(z)::Type;
    const auto kernel = scan.total      ? scan.weighted ? partials_of_parts<T, true, true>
                                                        : partials_of_parts<T, false, true>
                             : scan.weighted ? partials_of_parts<T, true, false>
                                        : partials_of_parts<T, false, false>;
    launch(shape, kernel, z.view.data, z.view.stride, scan.columns, count, scan.scale, parts);
  });
}

void launch_partials(CUstream_st* stream, ConstMatrixRef logits, const RowScan& scan,
                     PartSums* parts, SoftmaxPartial* out) {
  launch_part_sums(stream, logits, scan, parts);
  launch({blocks_of(parts_of(logits.rows, block_threads)), block_threads, stream}, partials_of_rows,
         parts, logits.rows, parts_of(scan.columns, part_columns), scan.scale, scan.weighted, out);
}

void launch_cross_partials(CUstream_st* stream, ConstMatrixRef student, ConstMatrixRef teacher,
                           int64_t columns, CrossSums* parts, CrossPartial* out) {
  const int64_t count = parts_of(columns, part_columns);
  const Launch shape{blocks_of(student.rows * count), block_threads, stream};
  with_elements(student, [&](auto s) {
    with_elements(teacher, [&](auto t) {
      launch(shape, cross_partials_of_parts<typename decltype(s)::Type, typename decltype(t)::Type>,
             s.view.data, s.view.stride, t.view.data, t.view.stride, columns, count, parts);
    });
  });
  launch({blocks_of(parts_of(student.rows, block_threads)), block_threads, stream},
         cross_partials_of_rows, parts, student.rows, count, out);
}

void launch_sums(CUstream_st* stream, ConstMatrixRef values, int64_t columns, double* parts,
                 double* out) {
  const int64_t count = parts_of(columns, part_columns);
  with_elements(values, [&](auto v) {
    launch({blocks_of(values.rows * count), block_threads, stream},
           sums_of_parts<typename decltype(v)::Type>, v.view.data, v.view.stride, columns, count,
           parts);
  });
  launch({blocks_of(parts_of(values.rows, block_threads)), block_threads, stream}, sums_of_rows,
         parts, values.rows, count, out);
}

}  // namespace gyre::rows
