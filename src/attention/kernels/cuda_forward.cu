// Attention forward on a GPU, after FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1): a thread
// block keeps (O, top, sum) of up to 128 query rows of one head in registers over all keys that
// they see.
//
//     (top, sum, O) = previous (O, LSE)
//     for every inner tile of keys:
//       x     = Q Kᵀ, -inf where hidden,  c = scale log2(e)
//       top'  = max(top, c x),  w = 2^(c x - top'),  keep = 2^(top - top')
//       sum   = keep · sum + Σ w,  O = keep · O + W V,  top = top'
//     store O / sum and ln 2 · top + ln sum
//
// Merging thus costs only the read of earlier results; a separate merge would read and write all of
// O again. For a tile hidden from a row, keep = 1 and w = 0, which changes no bit of the row.
//
// Lower bound of the time: 2 (head_dim + value_dim) FLOPs per visible pair at the peak of the
// tensor cores (f32: of the FMA units and of shared memory, which feeds each FMA); the share
// reached is not measured. bf16: weights are rounded for the second product; the sum uses them
// unrounded.

#include "attention/kernels/cuda_output_head.cuh"
#include "attention/kernels/cuda_tile_code.cuh"

namespace gyre {
namespace {

template <class T, int dim_, TileForm form>
struct ForwardKernel {
  static constexpr TileShape shape = tile_shape(dtype_of<T>, Sweep::forward, dim_, form);
  static constexpr int dim = dim_, inner = shape.inner, groups = shape.groups;
  static constexpr int stride = tile_stride(dtype_of<T>, dim);
  using Lane = LaneGroups<groups>;

  /// A lane's part of 16 rows per group; until finish(), sums cover only its own columns.
  struct Rows {
    GroupSums<dim, groups> out;
    RowSum sums[groups][2];
  };

  __device__ __forceinline__ static void begin(const ForwardArguments& a, const OutputHead& out,
                                               const Lane& lane, int head, Rows& rows) {
    const LanePlace place;
    set_zero<dim>(rows.out);
    for_group_rows<groups>([&](int j, int i) {
      const int64_t at = lane.rows[j].row[i];
      RowSum& row = rows.sums[j][i];
      row = {};
      if (at >= a.out.rows) return;
      row = partial_of(a.lse.data[at * a.lse.stride + head]);
      if (row.sum == 0) return;
      if (place.t != 0) row.sum = 0;  // only the first of four lanes keeps the previous sum
      out.template read<dim>(lane.rows[j], i,
                             [&](int n, int e, float x) { rows.out[j][n][e] = x; });
    });
  }

  /// Turns scores into weights relative to the new maximum, and rescales earlier sums.
  __device__ __forceinline__ static void weigh(float scale, Sums<inner>& x, RowSum (&sums)[2],
                                               Sums<dim>& out) {
    for_rows([&](int i) {
      RowSum& row = sums[i];
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
      for_row_sums<dim>(i, [&](int n, int e) { out[n][e] *= keep; });
    });
  }

  __device__ __forceinline__ static void attend(const Lane& lane, int key, float scale, const T* q,
                                                const T* k, const T* v, float* weights,
                                                Rows& rows) {
    if (!lane.any_in(key, inner)) return;
    GroupSums<inner, groups> x;
    set_zero<inner>(x);
    add_row_products<dim, inner>(q, k, x);
    GYRE_UNROLL
    for (int j = 0; j < groups; ++j) {
      hide<inner>(lane.rows[j], key, x[j]);
      weigh(scale, x[j], rows.sums[j], rows.out[j]);
    }
    add_weighted_rows<dim, inner, dim>(x, v, rows.out, weights);
  }

  /// Stores the rows that saw a key.
  __device__ __forceinline__ static void finish(const ForwardArguments& a, const OutputHead& out,
                                                const Lane& lane, int head, const Rows& rows) {
    const LanePlace place;
    for_group_rows<groups>([&](int j, int i) {
      RowSum row = rows.sums[j][i];
      row.sum += __shfl_xor_sync(all_lanes, row.sum, 1);
      row.sum += __shfl_xor_sync(all_lanes, row.sum, 2);
      if (!lane.rows[j].seen[i]) return;
      if (place.t == 0) a.lse.data[lane.rows[j].row[i] * a.lse.stride + head] = lse_of(row);
      const float factor = row.sum == 0 ? 0 : 1 / row.sum;
      out.template write<dim>(lane.rows[j], i,
                              [&](int n, int e) { return factor * rows.out[j][n][e]; });
    });
  }
};

template <class T, int dim, TileForm form>
__global__ void __launch_bounds__(ForwardKernel<T, dim, form>::shape.threads())
    attention_forward(const ForwardArguments a) {
  using Kernel = ForwardKernel<T, dim, form>;
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
  const int kv_head = (head + a.heads.skew) / a.heads.group;
  const int rows_left = rows_in(a.q, tile, shape.outer());
  const auto inside = [rows_left](int row) { return row < rows_left; };
  load_tiles<dim, shape.outer(), shape.threads()>(inside,
                                                  TileSource<T>{q, a.q, tile.first_row, head});

  const auto load = [&](const Walk& walk, int stage) {
    const TileRectangle& r = a.tiles.rectangles[walk.range->rectangle];
    const int left = static_cast<int>(r.inner_length) - walk.begin;
    const int64_t first = r.inner_begin + walk.begin;
    const auto wanted = [left](int row) { return row < left; };
    load_tiles<dim, shape.inner, shape.threads()>(
        wanted, TileSource<T>{k + stage * inner_elements, a.k, first, kv_head},
        TileSource<T>{v + stage * inner_elements, a.v, first, kv_head});
  };
  const OutputHead out{a.out, head, a.heads.value_dim, 0};
  typename Kernel::Lane lane(tile.first_row, place.warp);
  typename Kernel::Rows rows;
  const float scale = a.heads.scale * log2_e;
  const auto begin = [&] { Kernel::begin(a, out, lane, head, rows); };
  const auto step = [&](const Walk& walk, int stage) {
    Kernel::attend(lane, walk.begin, scale, q + 16 * shape.groups * place.warp * Kernel::stride,
                   k + stage * inner_elements, v + stage * inner_elements, weights, rows);
  };
  const auto finish = [&] { Kernel::finish(a, out, lane, head, rows); };
  walk_ranges<shape.stages>(a.tiles, a.store_each_range, Walk(a.tiles, tile, 0, 1, shape.inner),
                            lane, load, begin, step, finish);
}

}  // namespace

void start_forward(const ForwardArguments& arguments, DType type, TileForm form,
                   CUstream_st* stream) {
  with_kernel<ForwardKernel, Sweep::forward>(
      type, arguments.heads.widest_dim(), form,
      [&]<class T, int dim, TileForm form>(ForwardKernel<T, dim, form>) {
        launch_tiles<T, Sweep::forward>(ForwardKernel<T, dim, form>::shape, arguments.heads.heads,
                                        attention_forward<T, dim, form>, arguments, stream);
      });
}

}  // namespace gyre
