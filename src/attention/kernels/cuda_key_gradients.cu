// dK and dV of attention on a GPU: a thread block keeps the sums of up to 128 key rows of one KV
// head over all queries that see them, of all query heads of its group.
//
//     for every range, for every query head of the KV head, for every inner tile of queries:
//       w   = 2^(scale log2(e) · K Qᵀ - LSE log2(e)), 0 where hidden        [key][query]
//       ds  = w (V dOᵀ - delta)
//       dV += w dO,  dK += scale · ds Q
//
// Lower bound of the time: 4 (head_dim + value_dim) FLOPs per visible pair at the peak of the
// tensor cores. How close the kernel comes has not been measured. bf16: w and ds are rounded as
// factors of products. Dimension 256: each of two blocks sums half of the columns, and both compute
// all of w and ds.

#include "attention/kernels/cuda_output_head.cuh"
#include "attention/kernels/cuda_tile_code.cuh"

namespace gyre {
namespace {

template <class T, int dim_, TileForm form>
struct KeyGradients {
  static constexpr TileShape shape = tile_shape(dtype_of<T>, Sweep::key_gradients, dim_, form);
  static constexpr int dim = dim_, inner = shape.inner, columns = dim / shape.column_parts;
  static constexpr int groups = shape.groups;
  static constexpr int stride = tile_stride(dtype_of<T>, dim);

  using Lane = LaneGroups<groups>;
  using Scores = GroupSums<inner, groups>;

  /// A lane's part of 16 rows per group.
  struct Rows {
    GroupSums<columns, groups> d_k, d_v;
  };
  /// Inner tile of queries [begin, begin + inner) of one head.
  struct Queries {
    const T *q, *d_out;
    const TileRectangle* rectangle;
    int head, begin;
  };

  /// Replaces scores x by w, and dO · V in d_s by ds.
  __device__ __forceinline__ static void weigh(const BackwardArguments& a, const Lane& lane,
                                               const Queries& queries, Scores& x, Scores& d_s) {
    const LanePlace place;
    const float scale = a.heads.scale * log2_e;
    GYRE_UNROLL
    for (int j = 0; j < groups; ++j) hide<inner>(lane.rows[j], queries.begin, x[j]);
    for_row_sums<inner>(0, [&](int n, int c) {
      const int query = queries.begin + place.column(n, c);
      const bool inside = query < queries.rectangle->inner_length;
      const int64_t row = queries.rectangle->inner_begin + (inside ? query : 0);
      const float shift = backward_shift(a.lse.data[row * a.lse.stride + queries.head]);
      const float delta = a.delta.data[row * a.delta.stride + queries.head];
      for_group_rows<groups>([&](int j, int i) {
        float &w = x[j][n][2 * i + c], &ds = d_s[j][n][2 * i + c];
        w = fast_exp2(fmaf(w, scale, -shift));
        ds = w != 0 ? w * (ds - delta) : 0;  // delta of a row without keys is arbitrary
      });
    });
  }

  /// Adds to the columns of part `part` of dK and dV.
  __device__ __forceinline__ static void differentiate(const BackwardArguments& a, const Lane& lane,
                                                       const Queries& queries, const T* k,
                                                       const T* v, int part, float* weights,
                                                       Rows& rows) {
    if (!lane.any_in(queries.begin, inner)) return;
    Scores x, d_s;
    set_zero<inner>(x);
    set_zero<inner>(d_s);
    add_row_products<dim, inner>(k, queries.q, x);
    add_row_products<dim, inner>(v, queries.d_out, d_s);
    weigh(a, lane, queries, x, d_s);
    add_weighted_rows<dim, inner, columns>(x, queries.d_out + part * columns, rows.d_v, weights);
    add_weighted_rows<dim, inner, columns>(d_s, queries.q + part * columns, rows.d_k, weights);
  }

  __device__ __forceinline__ static void finish(const BackwardArguments& a, const Lane& lane,
                                                int kv_head, int part, const Rows& rows) {
    const OutputHead d_k{a.d_k, kv_head, a.heads.head_dim, part * columns},
        d_v{a.d_v, kv_head, a.heads.value_dim, part * columns};
    for_group_rows<groups>([&](int j, int i) {
      if (!lane.rows[j].seen[i]) return;
      d_k.template add<columns>(lane.rows[j], i, rows.d_k[j], a.heads.scale);
      d_v.template add<columns>(lane.rows[j], i, rows.d_v[j], 1);
    });
  }
};

template <class T, int dim, TileForm form>
__global__ void __launch_bounds__(KeyGradients<T, dim, form>::shape.threads())
    attention_key_gradients(const BackwardArguments a) {
  using Kernel = KeyGradients<T, dim, form>;
  constexpr TileShape shape = Kernel::shape;
  constexpr int inner_elements = shape.inner * Kernel::stride;
  T* const k = reinterpret_cast<T*>(dynamic_shared());
  T* const v = k + shape.outer() * Kernel::stride;
  T* const q = v + shape.outer() * Kernel::stride;
  T* const d_out = q + shape.stages * inner_elements;
  const LanePlace place;
  float* const weights = reinterpret_cast<float*>(d_out + shape.stages * inner_elements) +
                         place.warp * 16 * weight_stride(shape.inner);

  const int kv_head = static_cast<int>(blockIdx.x) % a.heads.kv_heads;
  const int part = static_cast<int>(blockIdx.y);
  const OuterTile tile = a.tiles.tiles[static_cast<int>(blockIdx.x) / a.heads.kv_heads];
  const int head_begin = max(kv_head * a.heads.group - a.heads.skew, 0);
  const int head_end = min((kv_head + 1) * a.heads.group - a.heads.skew, a.heads.heads);
  if (head_begin >= head_end) return;
  const int rows_left = rows_in(a.k, tile, shape.outer());
  const auto inside = [rows_left](int row) { return row < rows_left; };
  load_tiles<dim, shape.outer(), shape.threads()>(inside,
                                                  TileSource<T>{k, a.k, tile.first_row, kv_head},
                                                  TileSource<T>{v, a.v, tile.first_row, kv_head});

  const auto load = [&](const Walk& walk, int stage) {
    const TileRectangle& r = a.tiles.rectangles[walk.range->rectangle];
    const int left = static_cast<int>(r.inner_length) - walk.begin;
    const int64_t first = r.inner_begin + walk.begin;
    const float* const lse = a.lse.data + first * a.lse.stride + walk.head;
    // Rows without a gradient are loaded as zeros: their weights of 0 then multiply finite numbers.
    const auto wanted = [&](int row) {
      const int some = row < left ? row : 0;  // always read: avoids a branch per row
      return lse[some * a.lse.stride] != -std::numeric_limits<float>::infinity() && row < left;
    };
    load_tiles<dim, shape.inner, shape.threads()>(
        wanted, TileSource<T>{q + stage * inner_elements, a.q, first, walk.head},
        TileSource<T>{d_out + stage * inner_elements, a.d_out, first, walk.head});
  };
  typename Kernel::Lane lane(tile.first_row, place.warp);
  typename Kernel::Rows rows;
  const auto begin = [&] {
    set_zero<Kernel::columns>(rows.d_k);
    set_zero<Kernel::columns>(rows.d_v);
  };
  const auto step = [&](const Walk& walk, int stage) {
    const typename Kernel::Queries queries{
        q + stage * inner_elements, d_out + stage * inner_elements,
        &a.tiles.rectangles[walk.range->rectangle], walk.head, walk.begin};
    const int own = 16 * shape.groups * place.warp * Kernel::stride;
    Kernel::differentiate(a, lane, queries, k + own, v + own, part, weights, rows);
  };
  const auto finish = [&] { Kernel::finish(a, lane, kv_head, part, rows); };
  walk_ranges<shape.stages>(a.tiles, a.store_each_range,
                            Walk(a.tiles, tile, head_begin, head_end, shape.inner), lane, load,
                            begin, step, finish);
}

}  // namespace

void start_key_gradients(const BackwardArguments& arguments, DType type, TileForm form,
                         CUstream_st* stream) {
  with_kernel<KeyGradients, Sweep::key_gradients>(
      type, arguments.heads.widest_dim(), form,
      [&]<class T, int dim, TileForm form>(KeyGradients<T, dim, form>) {
        launch_tiles<T, Sweep::key_gradients>(
            KeyGradients<T, dim, form>::shape, arguments.heads.kv_heads,
            attention_key_gradients<T, dim, form>, arguments, stream);
      });
}

}  // namespace gyre
