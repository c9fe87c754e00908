// dQ of attention on a GPU: a thread block keeps the sums of up to 128 query rows of one head over
// all keys that they see.
//
//     for every inner tile of keys:
//       w   = 2^(scale log2(e) · Q Kᵀ - LSE log2(e)), 0 where hidden
//       ds  = w (dO Vᵀ - delta)
//       dQ += scale · ds K
//
// This file computes three products and cuda_key_gradients.cu four, where one sweep would need
// five. In return no two blocks add to the same sum: no atomics, and equal bits in every run.
//
// Lower bound of the time: 4 head_dim + 2 value_dim FLOPs per visible pair at the peak of the
// tensor cores. How close the kernel comes has not been measured. bf16: ds is rounded for
// the third product.

#include "attention/kernels/cuda_output_head.cuh"
#include "attention/kernels/cuda_tile_code.cuh"

namespace gyre {
namespace {

template <class T, int dim_, TileForm form>
struct QueryGradients {
  static constexpr TileShape shape = tile_shape(dtype_of<T>, Sweep::query_gradients, dim_, form);
  static constexpr int dim = dim_, inner = shape.inner, groups = shape.groups;
  static constexpr int stride = tile_stride(dtype_of<T>, dim);
  using Lane = LaneGroups<groups>;

  /// A lane's part of 16 rows per group.
  struct Rows {
    GroupSums<dim, groups> d_q;
    float shift[groups][2], delta[groups][2];
  };

  __device__ __forceinline__ static void begin(const BackwardArguments& a, const Lane& lane,
                                               int head, Rows& rows) {
    set_zero<dim>(rows.d_q);
    for_group_rows<groups>([&](int j, int i) {
      const int64_t row = lane.rows[j].row[i];
      const bool inside = row < a.q.rows;
      rows.shift[j][i] = backward_shift(inside ? a.lse.data[row * a.lse.stride + head]
                                               : -std::numeric_limits<float>::infinity());
      rows.delta[j][i] = inside ? a.delta.data[row * a.delta.stride + head] : 0;
    });
  }

  __device__ __forceinline__ static void differentiate(const Lane& lane, int key, float scale,
                                                       const T* q, const T* d_out, const T* k,
                                                       const T* v, float* weights, Rows& rows) {
    if (!lane.any_in(key, inner)) return;
    GroupSums<inner, groups> x, d_s;
    set_zero<inner>(x);
    set_zero<inner>(d_s);
    add_row_products<dim, inner>(q, k, x);
    add_row_products<dim, inner>(d_out, v, d_s);
    GYRE_UNROLL
    for (int j = 0; j < groups; ++j) {
      hide<inner>(lane.rows[j], key, x[j]);
      for_sums<inner>([&](int n, int e) {
        const float w = fast_exp2(fmaf(x[j][n][e], scale, -rows.shift[j][e / 2]));
        d_s[j][n][e] = w * (d_s[j][n][e] - rows.delta[j][e / 2]);
      });
    }
    add_weighted_rows<dim, inner, dim>(d_s, k, rows.d_q, weights);
  }

  __device__ __forceinline__ static void finish(const BackwardArguments& a, const Lane& lane,
                                                int head, const Rows& rows) {
    const OutputHead to{a.d_q, head, a.heads.head_dim, 0};
    for_group_rows<groups>([&](int j, int i) {
      if (lane.rows[j].seen[i] && rows.shift[j][i] != std::numeric_limits<float>::infinity())
        to.template add<dim>(lane.rows[j], i, rows.d_q[j], a.heads.scale);
    });
  }
};

template <class T, int dim, TileForm form>
__global__ void __launch_bounds__(QueryGradients<T, dim, form>::shape.threads())
    attention_query_gradients(const BackwardArguments a) {
  using Kernel = QueryGradients<T, dim, form>;
  constexpr TileShape shape = Kernel::shape;
  constexpr int inner_elements = shape.inner * Kernel::stride;
  T* const q = reinterpret_cast<T*>(dynamic_shared());
  T* const d_out = q + shape.outer() * Kernel::stride;
  T* const k = d_out + shape.outer() * Kernel::stride;
  T* const v = k + shape.stages * inner_elements;
  const LanePlace place;
  float* const weights = reinterpret_cast<float*>(v + shape.stages * inner_elements) +
                         place.warp * 16 * weight_stride(shape.inner);

  const int head = static_cast<int>(blockIdx.x) % a.heads.heads;
  const OuterTile tile = a.tiles.tiles[static_cast<int>(blockIdx.x) / a.heads.heads];
  const int kv_head = (head + a.heads.skew) / a.heads.group;
  // Rows without a gradient are loaded as zeros: their weights of 0 then multiply finite numbers.
  const int rows_left = rows_in(a.q, tile, shape.outer());
  const float* const lse = a.lse.data + tile.first_row * a.lse.stride + head;
  const auto wanted_row = [&](int row) {
    const int some = row < rows_left ? row : 0;  // always read: avoids a branch per row
    return lse[some * a.lse.stride] != -std::numeric_limits<float>::infinity() && row < rows_left;
  };
  load_tiles<dim, shape.outer(), shape.threads()>(
      wanted_row, TileSource<T>{q, a.q, tile.first_row, head},
      TileSource<T>{d_out, a.d_out, tile.first_row, head});

  const auto load = [&](const Walk& walk, int stage) {
    const TileRectangle& r = a.tiles.rectangles[walk.range->rectangle];
    const int left = static_cast<int>(r.inner_length) - walk.begin;
    const int64_t first = r.inner_begin + walk.begin;
    const auto wanted = [left](int row) { return row < left; };
    load_tiles<dim, shape.inner, shape.threads()>(
        wanted, TileSource<T>{k + stage * inner_elements, a.k, first, kv_head},
        TileSource<T>{v + stage * inner_elements, a.v, first, kv_head});
  };
  typename Kernel::Lane lane(tile.first_row, place.warp);
  typename Kernel::Rows rows;
  const auto begin = [&] { Kernel::begin(a, lane, head, rows); };
  const auto step = [&](const Walk& walk, int stage) {
    const int own = 16 * shape.groups * place.warp * Kernel::stride;
    Kernel::differentiate(lane, walk.begin, a.heads.scale * log2_e, q + own, d_out + own,
                          k + stage * inner_elements, v + stage * inner_elements, weights, rows);
  };
  const auto finish = [&] { Kernel::finish(a, lane, head, rows); };
  walk_ranges<shape.stages>(a.tiles, a.store_each_range, Walk(a.tiles, tile, 0, 1, shape.inner),
                            lane, load, begin, step, finish);
}

}  // namespace

void start_query_gradients(const BackwardArguments& arguments, DType type, TileForm form,
                           CUstream_st* stream) {
  with_kernel<QueryGradients, Sweep::query_gradients>(
      type, arguments.heads.widest_dim(), form,
      [&]<class T, int dim, TileForm form>(QueryGradients<T, dim, form>) {
        launch_tiles<T, Sweep::query_gradients>(
            QueryGradients<T, dim, form>::shape, arguments.heads.heads,
            attention_query_gradients<T, dim, form>, arguments, stream);
      });
}

}  // namespace gyre
