// Attention forward on a GPU, after FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1): a block
// of threads keeps (O, top, sum) of up to 64 query rows of one head in registers over all keys that
// they see.
//
//     (top, sum, O) = what (O, LSE) held
//     for every inner tile of keys:
//       x     = Q Kᵀ, -inf where hidden,  c = scale log2(e)
//       top'  = max(top, c x),  w = 2^(c x - top'),  keep = 2^(top - top')
//       sum   = keep · sum + Σ w,  O = keep · O + W V,  top = top'
//     O / sum and ln 2 · top + ln sum are stored
//
// So what was there before costs nothing but its reading: a separate merge would read and write all
// of O again. A tile that is hidden from a row gives it keep = 1 and w = 0, which changes no bit.
//
// Limit: 4 · head_dim FLOPs a visible pair over the peak of the tensor cores (f32: of the FMA
// units, and of shared memory, which feeds each FMA there); what share of the peak this reaches has
// not been measured. bf16: weights are rounded to bf16 for the second product, the sum is of those
// before rounding.

#include "attention/kernels/cuda_output_head.cuh"
#include "attention/kernels/cuda_tile_code.cuh"

namespace gyre {
namespace {

template <class T, int dim_, InnerTiles tiles>
struct ForwardKernel {
  using Element = T;
  static constexpr TileShape shape = tile_shape(dtype_of<T>, Sweep::forward, dim_, tiles);
  static constexpr int dim = dim_, inner = shape.inner;
  static constexpr int stride = tile_stride(dtype_of<T>, dim);

  /// A lane's part of 16 rows: sum of its own columns only, until finish().
  struct Rows {
    Sums<dim> out;
    RowSum sums[2];
  };

  __device__ __forceinline__ static void begin(const ForwardArguments& a, const OutputHead& out,
                                               const LaneRows& lane, int head, Rows& rows) {
    const LanePlace place;
    set_zero<dim>(rows.out);
    for_rows([&](int i) {
      rows.sums[i] = {};
      if (lane.row[i] >= a.out.rows) return;
      rows.sums[i] = partial_of(a.lse.data[lane.row[i] * a.lse.stride + head]);
      if (rows.sums[i].sum == 0) return;
      if (place.t != 0) rows.sums[i].sum = 0;  // the first lane of four has what was there
      out.template read<dim>(lane, i, [&](int n, int e, float x) { rows.out[n][e] = x; });
    });
  }

  /// Weights from scores, relative to a maximum that has grown; scales what was summed before.
  __device__ __forceinline__ static void weigh(float scale, Sums<inner>& x, Rows& rows) {
    for_rows([&](int i) {
      RowSum& row = rows.sums[i];
      float best = -std::numeric_limits<float>::infinity();
      for_row_sums<inner>(i, [&](int n, int e) { best = fmaxf(best, x[n][e]); });
      best = fmaxf(best, __shfl_xor_sync(all_lanes, best, 1));
      best = fmaxf(best, __shfl_xor_sync(all_lanes, best, 2));
      const float top = fmaxf(row.top, rounded_product(best, scale));
      const float shift = shift_of(top), keep = fast_exp2(row.top - shift);
      float sum = 0;
      for_row_sums<inner>(i, [&](int n, int e) {
        x[n][e] = fast_exp2(fmaf(x[n][e], scale, -shift));
        sum += x[n][e];
      });
      row = {top, fmaf(row.sum, keep, sum)};
      for_row_sums<dim>(i, [&](int n, int e) { rows.out[n][e] *= keep; });
    });
  }

  __device__ __forceinline__ static void attend(const LaneRows& lane, int key, float scale,
                                                const T* q, const T* k, const T* v, float* weights,
                                                Rows& rows) {
    if (!lane.any_in(key, inner)) return;
    Sums<inner> x;
    set_zero<inner>(x);
    add_row_products<dim, inner>(q, k, x);
    hide<inner>(lane, key, x);
    weigh(scale, x, rows);
    add_weighted_rows<dim, inner, dim>(x, v, rows.out, weights);
  }

  /// Stores the rows that saw something.
  __device__ __forceinline__ static void finish(const ForwardArguments& a, const OutputHead& out,
                                                const LaneRows& lane, int head, const Rows& rows) {
    const LanePlace place;
    for_rows([&](int i) {
      RowSum row = rows.sums[i];
      row.sum += __shfl_xor_sync(all_lanes, row.sum, 1);
      row.sum += __shfl_xor_sync(all_lanes, row.sum, 2);
      if (!lane.seen[i]) return;
      if (place.t == 0) a.lse.data[lane.row[i] * a.lse.stride + head] = lse_of(row);
      const float factor = row.sum == 0 ? 0 : 1 / row.sum;
      out.template write<dim>(lane, i, [&](int n, int e) { return factor * rows.out[n][e]; });
    });
  }
};

template <class T, int dim, InnerTiles tiles>
__global__ void __launch_bounds__(ForwardKernel<T, dim, tiles>::shape.threads())
    attention_forward(const ForwardArguments a) {
  using Kernel = ForwardKernel<T, dim, tiles>;
  constexpr TileShape shape = Kernel::shape;
  constexpr int inner_elements = shape.inner * Kernel::stride;
  T* const q = reinterpret_cast<T*>(dynamic_shared());
  T* const k = q + shape.outer() * Kernel::stride;
  T* const v = k + shape.stages * inner_elements;
  const LanePlace place;
  float* const weights = reinterpret_cast<float*>(v + shape.stages * inner_elements) +
                         place.warp * 16 * weight_stride(shape.inner);

  const int head = static_cast<int>(blockIdx.x) % a.heads.heads;
  const OuterTile tile = a.tiles.tiles[static_cast<int>(blockIdx.x) / a.heads.heads];
  const int64_t column = head * a.heads.head_dim;
  const int64_t kv_column = (head + a.heads.skew) / a.heads.group * a.heads.head_dim;
  const int rows_left = rows_in(a.q, tile, shape.outer());
  const auto inside = [rows_left](int row) { return row < rows_left; };
  load_tiles<dim, shape.outer(), shape.threads()>(a.heads.head_dim, inside,
                                                  TileSource<T>{q, a.q, tile.first_row, column});

  const auto load = [&](const Walk& walk, int stage) {
    const TileRectangle& r = a.tiles.rectangles[walk.visit->rectangle];
    const int left = static_cast<int>(r.inner_length) - walk.begin;
    const int64_t first = r.inner_begin + walk.begin;
    const auto wanted = [left](int row) { return row < left; };
    load_tiles<dim, shape.inner, shape.threads()>(
        a.heads.head_dim, wanted, TileSource<T>{k + stage * inner_elements, a.k, first, kv_column},
        TileSource<T>{v + stage * inner_elements, a.v, first, kv_column});
  };
  const OutputHead out{a.out, column, a.heads.head_dim, 0};
  LaneRows lane(tile.first_row);
  typename Kernel::Rows rows;
  const float scale = a.heads.scale * log2_e;
  const auto begin = [&] { Kernel::begin(a, out, lane, head, rows); };
  const auto step = [&](const Walk& walk, int stage) {
    Kernel::attend(lane, walk.begin, scale, q + 16 * place.warp * Kernel::stride,
                   k + stage * inner_elements, v + stage * inner_elements, weights, rows);
  };
  const auto finish = [&] { Kernel::finish(a, out, lane, head, rows); };
  walk_visits<shape.stages>(a.tiles, a.visit_by_visit, Walk(a.tiles, tile, 0, 1, shape.inner), lane,
                            load, begin, step, finish);
}

template <class T, int dim, InnerTiles tiles>
void start(const ForwardArguments& arguments, CUstream_st* stream) {
  constexpr TileShape shape = ForwardKernel<T, dim, tiles>::shape;
  const auto blocks =
      static_cast<unsigned>(arguments.tiles.count) * static_cast<unsigned>(arguments.heads.heads);
  launch({blocks, static_cast<unsigned>(shape.threads()), stream,
          static_cast<size_t>(shared_bytes(dtype_of<T>, Sweep::forward, shape))},
         attention_forward<T, dim, tiles>, arguments);
}

template <class T, int dim>
using WideForward = ForwardKernel<T, dim, InnerTiles::wide>;

}  // namespace

void start_forward(const ForwardArguments& arguments, DType type, InnerTiles tiles,
                   CUstream_st* stream) {
  with_kernel<WideForward>(type, arguments.heads.head_dim, [&]<class Kernel>(Kernel) {
    using T = typename Kernel::Element;
    constexpr int dim = Kernel::dim;
    constexpr TileShape narrow = tile_shape(dtype_of<T>, Sweep::forward, dim, InnerTiles::narrow);
    if constexpr (narrow.inner != Kernel::shape.inner)
      if (tiles == InnerTiles::narrow) return start<T, dim, InnerTiles::narrow>(arguments, stream);
    start<T, dim, InnerTiles::wide>(arguments, stream);
  });
}

}  // namespace gyre
