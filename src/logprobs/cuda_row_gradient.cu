// Gradients and log-probabilities: each element is computed from its row's constants. Two small
// kernels around the pass add the weights of ids, because the pass may overwrite the logits:
//
//     before   finds the kind of each row (zeros, NaN, values), and computes the f32 gradient of
//              the element of each id in the shard
//     the pass
//     after    writes the elements of ids: that gradient plus all weights of the id, rounded once

#include "logprobs/cuda_row_lanes.cuh"
#include "logprobs/cuda_row_launch.hpp"

namespace gyre::rows {
namespace {

/// Columns of a row per block; the results do not depend on it.
constexpr int64_t written_columns = 16384;

/// This block's part of a row of `out`.
template <class To>
__device__ PartOfRow part_of(const MatrixView<To>& out) {
  return {parts_of(out.cols, written_columns), out.cols, written_columns};
}

/// Writes `constant` to columns [begin, end); reads nothing.
template <class To>
__device__ void fill_part(To* to, int64_t begin, int64_t end, float constant) {
  if (begin >= end) return;
  constexpr int lanes = lanes_of<To>;
  const Grid<lanes> grid(begin, end, to);
  Lanes<lanes> out;
  for (int i = 0; i < lanes; ++i) out.x[i] = constant;
  for (int64_t at = grid.first + threadIdx.x * lanes; at < end; at += block_threads * lanes)
    grid.store(to, {at, grid.whole(at)}, out);
}

/// Writes a part of a row without the weights of ids: op(column, values...) if the row's kind is
/// RowKind::values, else 0 or NaN. Columns from `columns` on get `padding`. `to` may be a `from`.
template <class Op, class To, class... From>
__device__ void write_part(const PartOfRow& mine, int64_t columns, float padding, RowKind kind,
                           const Op& op, To* to, const From*... from) {
  const int64_t end = min(mine.end, columns);
  if (kind != RowKind::values) {
    fill_part(to, mine.begin, end, kind == RowKind::nans ? nan_value : 0);
  } else if (mine.begin < end) {
    const Grid<lanes_of<To, From...>> grid(mine.begin, end, to, from...);
    for_each_vector(
        grid,
        [&](Place at, const auto&... values) { grid.store(to, at, op(at.column, values...)); },
        from...);
  }
  fill_part(to, max(mine.begin, columns), mine.end, padding);
}

/// Applies `element` to each element of a vector.
template <class Element>
struct EachLane {
  Element element;
  template <int lanes, class... More>
  __device__ Lanes<lanes> operator()(int64_t column, const Lanes<lanes>& z,
                                     const More&... more) const {
    Lanes<lanes> out;
    for (int i = 0; i < lanes; ++i) out.x[i] = element(column + i, z.x[i], more.x[i]...);
    return out;
  }
};
template <class Element>
__device__ EachLane<Element> each_lane(const Element& element) {
  return {element};
}

/// Applies `slope` to the elements of a vector that survive; the others become 0. The cut is
/// located once per vector, so that no element needs a branch.
struct SlopeOfSurvivors {
  SlopeOf slope;
  RowSurvivors kept;
  template <int lanes>
  __device__ Lanes<lanes> operator()(int64_t column, const Lanes<lanes>& z) const {
    const auto cut = static_cast<int>(min(max(kept.cut - column, int64_t{0}), int64_t{lanes}));
    Lanes<lanes> out;
    for (int i = 0; i < lanes; ++i) {
      const float s = slope(z.x[i]);
      out.x[i] = survives({kept.threshold, cut}, z.x[i], i) ? s : 0.0F;
    }
    return out;
  }
};

__device__ GradientCoefficients coefficients_of_row(const GradientTask& task, int64_t row) {
  return task.coefficients == nullptr ? GradientCoefficients{} : task.coefficients[row];
}

/// One warp per row determines its kind, and the column and gradient of each id in the shard.
template <class T>
__global__ void __launch_bounds__(block_threads)
    before_gradient(const T* logits, int64_t stride, int64_t rows, GradientTask task) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * block_warps + threadIdx.x / warp_lanes;
  if (row >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  const DeviceTokenIds& token_ids = task.token_ids;
  const int64_t first = row * token_ids.per_row, end = first + token_ids.per_row;
  int mine = 0;
  for (int64_t k = first + lane; k < end; k += warp_lanes) mine |= token_ids.weights[k] != 0;
  const bool weighted = __any_sync(all_lanes, mine) != 0;
  const GradientCoefficients coefficients = coefficients_of_row(task, row);
  const bool sloped = coefficients.a != 0 || coefficients.b != 0;
  const RowNormalizer normalizer =
      task.normalizers == nullptr ? RowNormalizer{} : task.normalizers[row];
  RowKind kind = kind_of(normalizer, sloped, sloped || weighted);
  // Filtered columns must be distinguished even if the coefficients are 0.
  if (task.survivors != nullptr && kind == RowKind::zeros && weighted) kind = RowKind::values;
  if (lane == 0) task.kinds[row] = kind;
  const SlopeOf op(normalizer, task.pass.scale, coefficients);
  for (int64_t k = first + lane; k < end; k += warp_lanes) {
    int64_t column = weighted && kind != RowKind::nans
                         ? column_of(token_ids.ids[k], token_ids.first_column, task.pass.columns)
                         : -1;
    float base = 0;
    if (column >= 0 && kind == RowKind::values) {
      const float z = to_float(logits[row * stride + column]);
      if (task.survivors != nullptr && !survives(task.survivors[row], z, column)) column = -1;
      base = op(z);
    }
    token_ids.columns[k] = static_cast<int32_t>(column);
    token_ids.bases[k] = base;
  }
}

/// One thread per id: adds the weights of equal ids of the row, in order, to the gradient that
/// before_gradient computed. Only the thread of the last of these ids writes the element.
template <class T>
__global__ void __launch_bounds__(block_threads)
    after_gradient(T* out, int64_t stride, int64_t count, DeviceTokenIds token_ids) {
  const int64_t k = static_cast<int64_t>(blockIdx.x) * block_threads + threadIdx.x;
  if (k >= count || token_ids.columns[k] < 0) return;
  const int64_t row = k / token_ids.per_row, first = row * token_ids.per_row;
  const int32_t column = token_ids.columns[k];
  for (int64_t other = k + 1; other < first + token_ids.per_row; ++other)
    if (token_ids.columns[other] == column) return;
  float sum = token_ids.bases[k];
  for (int64_t other = first; other <= k; ++other)
    if (token_ids.columns[other] == column) sum += token_ids.weights[other];
  store_one(out + row * stride + column, sum);
}

template <class From, class To>
__global__ void __launch_bounds__(block_threads)
    gradient(MatrixView<const From> logits, GradientTask task, MatrixView<To> out) {
  const PartOfRow mine = part_of(out);
  const RowKind kind = task.kinds[mine.row];
  const From* from = row_of(logits, mine.row);
  To* to = row_of(out, mine.row);
  const RowNormalizer normalizer =
      task.normalizers == nullptr ? RowNormalizer{} : task.normalizers[mine.row];
  const SlopeOf slope(normalizer, task.pass.scale, coefficients_of_row(task, mine.row));
  if (task.survivors == nullptr)
    write_part(mine, task.pass.columns, 0, kind,
               each_lane([&](int64_t, float z) { return slope(z); }), to, from);
  else
    write_part(mine, task.pass.columns, 0, kind, SlopeOfSurvivors{slope, task.survivors[mine.row]},
               to, from);
}

template <class From, class To>
__global__ void __launch_bounds__(block_threads)
    log_probabilities(MatrixView<const From> logits, RowPass pass, const RowNormalizer* normalizers,
                      bool exponentiate, MatrixView<To> out) {
  const PartOfRow mine = part_of(out);
  const RowNormalizer row = normalizers[mine.row];
  const RowKind kind = usable(row) ? RowKind::values : RowKind::nans;
  const From* from = row_of(logits, mine.row);
  To* to = row_of(out, mine.row);
  const Distribution p(row, pass.scale);
  if (exponentiate)
    write_part(mine, pass.columns, 0, kind,
               each_lane([&](int64_t, float z) { return p.probability(z); }), to, from);
  else
    write_part(mine, pass.columns, minus_infinity, kind, each_lane([&](int64_t, float z) {
                 return (z - row.max) * pass.scale - row.log_sum;
               }),
               to, from);
}

template <class From, class G, class To>
__global__ void __launch_bounds__(block_threads)
    log_softmax_gradient(MatrixView<const From> logits, MatrixView<const G> d_logprobs,
                         RowPass pass, const RowNormalizer* normalizers, const float* sums,
                         MatrixView<To> out) {
  const PartOfRow mine = part_of(out);
  const RowNormalizer row = normalizers[mine.row];
  const float sum = sums[mine.row];
  const Distribution p(row, pass.scale);
  write_part(mine, pass.columns, 0, usable(row) ? RowKind::values : RowKind::nans,
             each_lane([&](int64_t, float z, float g) {
               return pass.scale * (g - p.probability(z) * sum);
             }),
             row_of(out, mine.row), row_of(logits, mine.row), row_of(d_logprobs, mine.row));
}

template <class S, class T, class To>
__global__ void __launch_bounds__(block_threads)
    cross_gradient(MatrixView<const S> students, MatrixView<const T> teachers, int64_t columns,
                   const RowNormalizer* student_rows, const RowNormalizer* teacher_rows,
                   const float* gradients, MatrixView<To> out) {
  const PartOfRow mine = part_of(out);
  const float g = gradients[mine.row];
  const RowNormalizer student = student_rows[mine.row], teacher = teacher_rows[mine.row];
  const RowKind kind = g == 0                               ? RowKind::zeros
                       : usable(student) && usable(teacher) ? RowKind::values
                                                            : RowKind::nans;
  const Distribution q(student, 1), p(teacher, 1);
  write_part(mine, columns, 0, kind, each_lane([&](int64_t, float s, float t) {
               return g * (q.probability(s) - p.probability(t));
             }),
             row_of(out, mine.row), row_of(students, mine.row), row_of(teachers, mine.row));
}

template <class T>
__global__ void __launch_bounds__(block_threads)
    gather(const T* logits, int64_t stride, int64_t columns, int64_t count,
           DeviceTokenIds token_ids, float* values) {
  const int64_t k = static_cast<int64_t>(blockIdx.x) * block_threads + threadIdx.x;
  if (k >= count) return;
  const int64_t column = column_of(token_ids.ids[k], token_ids.first_column, columns);
  if (column >= 0) values[k] = to_float(logits[k / token_ids.per_row * stride + column]);
}

/// One block per part of a row.
Launch over_parts(CUstream_st* stream, const MatrixRef& out) {
  return {blocks_of(out.rows * parts_of(out.cols, written_columns)), block_threads, stream};
}

}  // namespace

void launch_gradient(CUstream_st* stream, ConstMatrixRef logits, const GradientTask& task,
                     MatrixRef out) {
  const int64_t id_count = out.rows * task.token_ids.per_row;
  with_elements(logits, [&](auto from) {
    using From = typename decltype(from)::Type;
    launch({blocks_of(parts_of(out.rows, block_warps)), block_threads, stream},
           before_gradient<From>, from.view.data, from.view.stride, out.rows, task);
    with_elements(out, [&](auto to) {
      using To = typename decltype(to)::Type;
      launch(over_parts(stream, out), gradient<From, To>, from.view, task, to.view);
      launch({blocks_of(parts_of(id_count, block_threads)), block_threads, stream},
             after_gradient<To>, to.view.data, to.view.stride, id_count, task.token_ids);
    });
  });
}

void launch_log_softmax(CUstream_st* stream, ConstMatrixRef logits, const RowPass& pass,
                        const RowNormalizer* normalizers, bool exponentiate, MatrixRef out) {
  with_elements(logits, [&](auto from) {
    with_elements(out, [&](auto to) {
      launch(over_parts(stream, out),
             log_probabilities<typename decltype(from)::Type, typename decltype(to)::Type>,
             from.view, pass, normalizers, exponentiate, to.view);
    });
  });
}

void launch_log_softmax_gradient(CUstream_st* stream, ConstMatrixRef logits,
                                 ConstMatrixRef d_logprobs, const RowPass& pass,
                                 const RowNormalizer* normalizers, const float* sums,
                                 MatrixRef out) {
  with_elements(logits, [&](auto from) {
    with_elements(d_logprobs, [&](auto g) {
      with_elements(out, [&](auto to) {
        launch(over_parts(stream, out),
               log_softmax_gradient<typename decltype(from)::Type, typename decltype(g)::Type,
                                    typename decltype(to)::Type>,
               from.view, g.view, pass, normalizers, sums, to.view);
      });
    });
  });
}

void launch_cross_gradient(CUstream_st* stream, ConstMatrixRef student, ConstMatrixRef teacher,
                           int64_t columns, const RowNormalizer* students,
                           const RowNormalizer* teachers, const float* gradients, MatrixRef out) {
  with_elements(student, [&](auto s) {
    with_elements(teacher, [&](auto t) {
      with_elements(out, [&](auto to) {
        launch(over_parts(stream, out),
               cross_gradient<typename decltype(s)::Type, typename decltype(t)::Type,
                              typename decltype(to)::Type>,
               s.view, t.view, columns, students, teachers, gradients, to.view);
      });
    });
  });
}

void launch_gather(CUstream_st* stream, ConstMatrixRef logits, int64_t columns,
                   const DeviceTokenIds& token_ids, float* values) {
  const int64_t count = logits.rows * token_ids.per_row;
  with_elements(logits, [&](auto z) {
    launch({blocks_of(parts_of(count, block_threads)), block_threads, stream},
           gather<typename decltype(z)::Type>, z.view.data, z.view.stride, columns, count,
           token_ids, values);
  });
}

}  // namespace gyre::rows
