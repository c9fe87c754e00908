// Gradients and log-probabilities: each element is computed from its row's constants. A pass adds
// the weights of ids to the f32 gradients of their elements, which are rounded once.
//
//     one id per row     its weight is added where the pass computes its element
//     several            before the pass overwrites the logits, the threads of a block compute the
//                        gradients of the elements of ids in their part; they write these elements,
//                        with all weights of their ids, after the pass

#include "logprobs/rows/cuda_row_lanes.cuh"
#include "logprobs/rows/cuda_row_launch.hpp"

namespace gyre::rows {
namespace {

/// Columns of a row per block; the results do not depend on it. Where blocks are many, each takes
/// twice as many: they wait less for their first loads.
GYRE_HOST_DEVICE inline int64_t written_columns(int64_t rows, int64_t columns) {
  constexpr int64_t usual = 16384, many_blocks = 16384;
  return rows * parts_of(columns, 2 * usual) >= many_blocks ? 2 * usual : usual;
}

/// This block's part of a row of `out`.
template <class To>
__device__ PartOfRow part_of(const MatrixView<To>& out) {
  const int64_t width = written_columns(out.rows, out.cols);
  return {parts_of(out.cols, width), out.cols, width};
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

/// Gradients of a row's elements without weights.
struct Slopes {
  SlopeOf slope;
  __device__ bool has(float, int64_t) const { return true; }
  template <int lanes>
  __device__ Lanes<lanes> operator()(int64_t, const Lanes<lanes>& z) const {
    Lanes<lanes> out;
    for (int i = 0; i < lanes; ++i) out.x[i] = slope(z.x[i]);
    return out;
  }
};

/// Like Slopes for elements that survive, 0 for others. The column of the cut is computed once per
/// vector, and no element needs a branch.
struct SlopesOfSurvivors {
  SlopeOf slope;
  RowSurvivors kept;
  __device__ bool has(float z, int64_t column) const { return survives(kept, z, column); }
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

/// `slopes`, plus the weight of the element in one column.
template <class Op>
struct WithOneWeight {
  Op slopes;
  int64_t column;
  float weight;
  template <int lanes>
  __device__ Lanes<lanes> operator()(int64_t at, const Lanes<lanes>& z) const {
    Lanes<lanes> out = slopes(at, z);
    const int64_t mine = column - at;
    if (mine >= 0 && mine < lanes)
      for (int i = 0; i < lanes; ++i)
        if (i == mine && slopes.has(z.x[i], column)) out.x[i] += weight;
    return out;
  }
};

/// The gradient of a part of a row.
template <class From, class To, class Op>
struct PartGradient {
  const GradientTask& task;
  PartOfRow mine;
  RowKind kind;
  Op slopes;
  const From* from;
  To* to;

  /// Column of an id in this part; -1 if it is elsewhere, or if the row becomes NaN.
  __device__ int64_t column_of_id(int64_t k) const {
    if (kind == RowKind::nans) return -1;
    const DeviceTokenIds& ids = task.token_ids;
    const int64_t column = column_of(ids.ids[k], ids.first_column, task.pass.columns);
    return column >= mine.begin && column < mine.end ? column : -1;
  }

  __device__ void with_one_id() const {
    const int64_t column = column_of_id(mine.row);
    const float given = task.token_ids.weights[mine.row], weight = column < 0 ? 0 : given;
    write_part(mine, task.pass.columns, 0, kind, WithOneWeight<Op>{slopes, column, weight}, to,
               from);
    if (kind != RowKind::zeros || weight == 0) return;  // the same for all threads
    __syncthreads();                                    // the zeros are written
    if (threadIdx.x == 0) store_one(to + column, weight);
  }

  /// Before the pass, keeps the gradients, without weights, of the elements of a thread's ids.
  /// Returns whether one of them is in this part.
  __device__ bool find_ids() const {
    const DeviceTokenIds& ids = task.token_ids;
    bool found = false;
    for (int64_t k = first() + threadIdx.x; k < first() + ids.per_row; k += block_threads) {
      const int64_t column = column_of_id(k);
      if (column < 0) continue;
      ids.bases[k] = kind == RowKind::values ? slopes.slope(to_float(from[column])) : 0;
      found = true;
    }
    return found;
  }
  /// After the pass: the last of equal ids writes the element with all their weights, in order.
  __device__ void write_ids() const {
    const DeviceTokenIds& ids = task.token_ids;
    const int64_t end = first() + ids.per_row;
    for (int64_t k = first() + threadIdx.x; k < end; k += block_threads) {
      const int64_t column = column_of_id(k);
      if (column < 0) continue;
      bool last = true;
      for (int64_t other = k + 1; other < end; ++other) last &= ids.ids[other] != ids.ids[k];
      if (!last) continue;
      float sum = ids.bases[k];
      for (int64_t other = first(); other <= k; ++other)
        if (ids.ids[other] == ids.ids[k]) sum += ids.weights[other];
      store_one(to + column, sum);
    }
  }
  __device__ void with_ids() const {
    if (kind == RowKind::values) prefetch_first(from, mine);
    const bool found = __syncthreads_or(find_ids()) != 0;  // their logits are read
    write_part(mine, task.pass.columns, 0, kind, slopes, to, from);
    if (!found) return;
    __syncthreads();
    write_ids();
  }

 private:
  __device__ int64_t first() const { return mine.row * task.token_ids.per_row; }
};

/// Whether a weight of this block's row is not 0.
__device__ bool is_weighted(const DeviceTokenIds& ids, int64_t row) {
  bool mine = false;
  for (int64_t k = threadIdx.x; k < ids.per_row; k += block_threads)
    mine |= ids.weights[row * ids.per_row + k] != 0;
  return __syncthreads_or(mine) != 0;
}

template <class From, class To, bool one_id>
__global__ void __launch_bounds__(block_threads, 3)
    gradient(MatrixView<const From> logits, const __grid_constant__ GradientTask task,
             MatrixView<To> out) {
  const PartOfRow mine = part_of(out);
  const GradientCoefficients coefficients =
      task.coefficients == nullptr ? GradientCoefficients{} : task.coefficients[mine.row];
  const RowNormalizer normalizer =
      task.normalizers == nullptr ? RowNormalizer{} : task.normalizers[mine.row];
  const bool sloped = !coefficients.is_zero();
  const bool weighted = !sloped && is_weighted(task.token_ids, mine.row);
  RowKind kind = kind_of(normalizer, sloped, sloped || weighted);
  // Filtered columns must be distinguished even if the coefficients are 0.
  if (task.survivors != nullptr && kind == RowKind::zeros && weighted) kind = RowKind::values;
  const auto run = [&](const auto& slopes) {
    const PartGradient<From, To, std::decay_t<decltype(slopes)>> part{
        task, mine, kind, slopes, row_of(logits, mine.row), row_of(out, mine.row)};
    if constexpr (one_id)
      part.with_one_id();
    else
      part.with_ids();
  };
  const SlopeOf slope(normalizer, task.pass.scale[mine.row], coefficients);
  if (task.survivors == nullptr)
    run(Slopes{slope});
  else if constexpr (one_id)
    run(SlopesOfSurvivors{slope, task.survivors[mine.row]});
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
  const float scale = pass.scale[mine.row];
  const Distribution p(row, scale);
  if (exponentiate)
    write_part(mine, pass.columns, 0, kind,
               each_lane([&](int64_t, float z) { return p.probability(z); }), to, from);
  else
    write_part(mine, pass.columns, minus_infinity, kind,
               each_lane([&](int64_t, float z) { return (z - row.max) * scale - row.log_sum; }), to,
               from);
}

template <class From, class G, class To>
__global__ void __launch_bounds__(block_threads)
    log_softmax_gradient(MatrixView<const From> logits, MatrixView<const G> d_logprobs,
                         RowPass pass, const RowNormalizer* normalizers, const float* sums,
                         MatrixView<To> out) {
  const PartOfRow mine = part_of(out);
  const RowNormalizer row = normalizers[mine.row];
  const float sum = sums[mine.row];
  const float scale = pass.scale[mine.row];
  const Distribution p(row, scale);
  write_part(
      mine, pass.columns, 0, usable(row) ? RowKind::values : RowKind::nans,
      each_lane([&](int64_t, float z, float g) { return scale * (g - p.probability(z) * sum); }),
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

template <class From, class To>
__global__ void __launch_bounds__(block_threads)
    projection_gradient(MatrixView<const From> logits, RowPass pass,
                        const RowNormalizer* normalizers, const RowCentre* centres,
                        DeviceEntries by_row, MatrixView<const float> d_projected,
                        MatrixView<To> out) {
  const PartOfRow mine = part_of(out);
  const RowNormalizer row = normalizers[mine.row];
  const RowCentre centre = centres[mine.row];
  const float* const d = row_of(d_projected, mine.row);
  const float scale = pass.scale[mine.row];
  const Distribution p(row, scale);
  const auto slope = [&](int64_t column, float z) {
    float g = 0;
    if (column >= 0 && column < pass.columns)  // a vector may begin before its part
      for (int32_t e = by_row.offsets[column]; e < by_row.offsets[column + 1]; ++e)
        g += by_row.entries[e].weight * d[by_row.entries[e].at];
    return scale * p.probability(z) * (g - centre.value);
  };
  write_part(mine, pass.columns, 0, kind_of(row, centre.needed, centre.needed), each_lane(slope),
             row_of(out, mine.row), row_of(logits, mine.row));
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
  const int64_t parts = parts_of(out.cols, written_columns(out.rows, out.cols));
  return {blocks_of(out.rows * parts), block_threads, stream};
}

}  // namespace

void launch_gradient(CUstream_st* stream, ConstMatrixRef logits, const GradientTask& task,
                     MatrixRef out) {
  const bool one_id = task.token_ids.per_row == 1;
  GYRE_CHECK(one_id || task.survivors == nullptr, "{} ids of a filtered row",
             task.token_ids.per_row);
  with_elements(logits, [&](auto from) {
    using From = typename decltype(from)::Type;
    with_elements(out, [&](auto to) {
      using To = typename decltype(to)::Type;
      launch(over_parts(stream, out), one_id ? gradient<From, To, true> : gradient<From, To, false>,
             from.view, task, to.view);
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

void launch_projection_gradient(CUstream_st* stream, ConstMatrixRef logits, const RowPass& pass,
                                const RowNormalizer* normalizers, const RowCentre* centres,
                                const DeviceEntries& by_row, MatrixView<const float> d_projected,
                                MatrixRef out) {
  with_elements(logits, [&](auto from) {
    with_elements(out, [&](auto to) {
      launch(over_parts(stream, out),
             projection_gradient<typename decltype(from)::Type, typename decltype(to)::Type>,
             from.view, pass, normalizers, centres, by_row, d_projected, to.view);
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
