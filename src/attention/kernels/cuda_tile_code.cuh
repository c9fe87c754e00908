#pragma once
// Common code of the CUDA attention kernels, except products: loading tiles into shared memory, the
// walk over ranges, the choice of a kernel.

#include <numeric>
#include <utility>

#include "attention/kernels/cuda_tile_products.cuh"

namespace gyre {

/// The 16-byte pieces of a tile [rows][dim] that a thread of `threads` copies. Pieces are numbered
/// row by row; thread t has pieces t, t + threads, t + 2 threads, ... A thread has `columns`
/// different columns (1, or 3 for dim 96); consecutive pieces of a column are `hop` rows apart.
template <class T, int dim, int rows, int threads>
struct TilePieces {
  static constexpr int together = 16 / sizeof(T), of_row = dim / together;
  static constexpr int columns = of_row / std::gcd(of_row, threads);
  static constexpr int hop = columns * threads / of_row, of_column = rows / hop;
  static_assert(rows % hop == 0, "every thread has equally many pieces");

  int row[columns], begin[columns];  ///< of the first piece per column

  __device__ __forceinline__ TilePieces() {
    GYRE_UNROLL
    for (int c = 0; c < columns; ++c) {
      const int piece = static_cast<int>(threadIdx.x) + c * threads;
      row[c] = piece / of_row;
      begin[c] = piece % of_row * together;
    }
  }
};

/// A tile and its source: row i is head `head` of row first + i of `from`.
template <class T>
struct TileSource {
  T* tile;
  const DeviceInput& from;
  int64_t first;
  int head;
  __device__ __forceinline__ int64_t column() const { return int64_t{head} * from.dim; }
};

/// Copies the pieces of one tile asynchronously; writes zeros unless some[column][j].
template <class T, int dim, int rows, int threads>
__device__ __forceinline__ void copy_pieces(
    const TilePieces<T, dim, rows, threads>& pieces,
    const bool (&some)[TilePieces<T, dim, rows, threads>::columns]
                      [TilePieces<T, dim, rows, threads>::of_column],
    const TileSource<T>& source) {
  using Pieces = TilePieces<T, dim, rows, threads>;
  constexpr int stride = tile_stride(dtype_of<T>, dim);
  const int64_t hop = Pieces::hop * source.from.stride;
  GYRE_UNROLL
  for (int c = 0; c < Pieces::columns; ++c) {
    T* const to = source.tile + pieces.row[c] * stride + pieces.begin[c];
    const T* piece = static_cast<const T*>(source.from.data) +
                     (source.first + pieces.row[c]) * source.from.stride + source.column() +
                     pieces.begin[c];
    const bool inside = pieces.begin[c] < source.from.dim;
    GYRE_UNROLL
    for (int j = 0; j < Pieces::of_column; ++j, piece += hop)
      copy_async(to + j * Pieces::hop * stride, piece, inside && some[c][j] ? 16 : 0);
  }
}

/// Copies a tile element by element, for rows that are not aligned.
template <int dim, int rows, int threads, class T, class Wanted>
__device__ void copy_elements(const TileSource<T>& source, const Wanted& wanted) {
  constexpr int together = 16 / sizeof(T), of_row = dim / together;
  constexpr int stride = tile_stride(dtype_of<T>, dim);
  GYRE_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < rows * of_row; i += threads) {
    const int row = i / of_row, begin = i % of_row * together;
    const int count = wanted(row) ? source.from.dim - begin : 0;
    T* const to = source.tile + row * stride + begin;
    const T* const piece = static_cast<const T*>(source.from.data) +
                           (source.first + row) * source.from.stride + source.column() + begin;
    GYRE_UNROLL
    for (int e = 0; e < together; ++e) to[e] = e < count ? piece[e] : T{};
  }
}

/// Fills tiles of `rows` rows with the elements of a head and zeros after them; row i is all
/// zeros unless wanted(i). Evaluates wanted once for all tiles, before the first copy, across which
/// the compiler moves no code. Asynchronous if rows are aligned.
template <int dim, int rows, int threads, class Wanted, class T, class... Others>
__device__ __forceinline__ void load_tiles(const Wanted& wanted, const TileSource<T>& source,
                                           const Others&... others) {
  using Pieces = TilePieces<T, dim, rows, threads>;
  const Pieces pieces;
  bool some[Pieces::columns][Pieces::of_column];
  GYRE_UNROLL
  for (int c = 0; c < Pieces::columns; ++c) {
    GYRE_UNROLL
    for (int j = 0; j < Pieces::of_column; ++j)
      some[c][j] = wanted(pieces.row[c] + j * Pieces::hop);
  }
  const auto load = [&](const TileSource<T>& from) {
    if (from.from.aligned)
      copy_pieces<T, dim, rows, threads>(pieces, some, from);
    else
      copy_elements<dim, rows, threads>(from, wanted);
  };
  load(source);
  (load(others), ...);
}

/// Iterates over the inner tiles of some ranges; each range is repeated for every head.
struct Walk {
  const TileRange *range, *last;  ///< [range, last)
  int head_begin, head_end, inner;
  int head = 0, begin = 0;

  __device__ Walk(const DeviceTiles& tiles, const OuterTile& tile, int head_begin_, int head_end_,
                  int inner_)
      : range(tiles.ranges + tile.range_begin),
        last(tiles.ranges + tile.range_end),
        head_begin(head_begin_),
        head_end(head_end_),
        inner(inner_),
        head(head_begin_),
        begin(range->begin) {}

  __device__ bool ended() const { return range == last; }
  __device__ void advance() {
    begin += inner;
    if (begin < range->end) return;
    if (++head == head_end) {
      head = head_begin;
      if (++range == last) return;
    }
    begin = range->begin;
  }
};

/// Calls use(walk, next, stage) for every step of the walk after load(walk, stage) has filled
/// shared memory. With two stages, the next step is loaded during use. The first wait also
/// completes earlier asynchronous copies.
template <int stages, class Load, class Use>
__device__ void pipeline(Walk walk, Load load, Use use) {
  static_assert(stages == 1 || stages == 2);
  if constexpr (stages == 2) {
    load(walk, 0);
    commit_copies();
  }
  for (int step = 0; !walk.ended(); ++step) {
    Walk next = walk;
    next.advance();
    if constexpr (stages == 2) {
      if (!next.ended()) load(next, (step + 1) % 2);
      commit_copies();
      wait_copies<1>();
    } else {
      load(walk, 0);
      commit_copies();
      wait_copies<0>();
    }
    __syncthreads();
    use(walk, next, stages == 2 ? step % 2 : 0);
    __syncthreads();  // before the stage is refilled
    walk = next;
  }
}

/// The two outer rows of a lane, among the 16 of its warp (warp 0: from `first_row` on), and the
/// inner rows that they see in the rectangle of a range.
struct LaneRows {
  int64_t row[2];
  InnerRange sees[2];
  bool seen[2] = {false, false};  ///< whether each saw any inner row since forget()

  __device__ explicit LaneRows(int64_t first_row) {
    const LanePlace place;
    row[0] = first_row + place.row(0), row[1] = first_row + place.row(1);
  }
  __device__ void forget() { seen[0] = seen[1] = false; }
  __device__ void enter(const TileRectangle& r) {
    for_rows([&](int i) {
      sees[i] = inner_range(r, row[i] - r.outer_begin);
      seen[i] = seen[i] || sees[i].begin < sees[i].end;
    });
  }
  /// Whether any row of the warp sees a row of an inner tile, and whether all rows see all of it.
  __device__ bool any_in(int begin, int count) const {
    return __any_sync(all_lanes, meets(sees[0], begin, count) || meets(sees[1], begin, count)) != 0;
  }
  __device__ bool all_in(int begin, int count) const {
    return __all_sync(all_lanes, covers(sees[0], begin, count) && covers(sees[1], begin, count)) !=
           0;
  }
};

/// The outer rows of a lane, two in each of the warp's groups of 16.
template <int groups>
struct LaneGroups {
  LaneRows rows[groups];

  __device__ LaneGroups(int64_t first_row, int warp) : LaneGroups(first_row, warp, Numbers{}) {}
  __device__ void forget() {
    for_groups([](LaneRows& lane) { lane.forget(); });
  }
  __device__ void enter(const TileRectangle& r) {
    for_groups([&](LaneRows& lane) { lane.enter(r); });
  }
  /// Whether any row of the warp sees any row of an inner tile.
  __device__ bool any_in(int begin, int count) const {
    bool any = false;
    GYRE_UNROLL
    for (int j = 0; j < groups; ++j) any = rows[j].any_in(begin, count) || any;
    return any;
  }

 private:
  using Numbers = std::make_integer_sequence<int, groups>;
  /// LaneRows adds 16 · warp to the first row, but a warp has 16 · groups rows.
  template <int... j>
  __device__ LaneGroups(int64_t first_row, int warp, std::integer_sequence<int, j...>)
      : rows{LaneRows(first_row + 16 * ((groups - 1) * warp + j))...} {}
  template <class F>
  __device__ __forceinline__ void for_groups(F f) {
    GYRE_UNROLL
    for (int j = 0; j < groups; ++j) f(rows[j]);
  }
};

/// Runs a walk: begin() before its first step, step(walk, stage) with `lane` set to the range's
/// rectangle, finish() after the last step; if store_each_range, begin and finish for each range.
template <int stages, class Lane, class Load, class Begin, class Step, class Finish>
__device__ __forceinline__ void walk_ranges(const DeviceTiles& tiles, bool store_each_range,
                                            const Walk& walk, Lane& lane, Load load, Begin begin,
                                            Step step, Finish finish) {
  const TileRange* range = nullptr;
  pipeline<stages>(walk, load, [&](const Walk& now, const Walk& next, int stage) {
    if (now.range != range) {
      if (range == nullptr || store_each_range) {
        lane.forget();
        begin();
      }
      range = now.range;
      lane.enter(tiles.rectangles[range->rectangle]);
    }
    step(now, stage);
    if (next.ended() || (store_each_range && next.range != range)) finish();
  });
}

/// Sets scores that rows do not see in the inner tile [begin, begin + inner) to -inf.
template <int inner>
__device__ __forceinline__ void hide(const LaneRows& lane, int begin, Sums<inner>& scores) {
  if (lane.all_in(begin, inner)) return;
  const LanePlace place;
  for_sums<inner>([&](int n, int e) {
    if (!contains(lane.sees[e / 2], begin + place.column(n, e)))
      scores[n][e] = -std::numeric_limits<float>::infinity();
  });
}

/// Number of existing rows from the first of a tile on, at most `count`.
__device__ inline int rows_in(const DeviceInput& from, const OuterTile& tile, int count) {
  return static_cast<int>(min(from.rows - tile.first_row, static_cast<int64_t>(count)));
}

/// Launches a kernel for tiles of `shape`: `column_parts` blocks per tile and head.
template <class T, Sweep sweep, class Arguments>
void launch_tiles(const TileShape& shape, int heads, void (*kernel)(Arguments),
                  const Arguments& arguments, CUstream_st* stream) {
  const auto blocks = static_cast<unsigned>(arguments.tiles.count) * static_cast<unsigned>(heads);
  launch({{blocks, static_cast<unsigned>(shape.column_parts)},
          static_cast<unsigned>(shape.threads()),
          stream,
          static_cast<size_t>(shared_bytes(dtype_of<T>, sweep, shape))},
         kernel, arguments);
}

/// Calls start(kernel) with the kernel of this element type, dimension and form from `Kernels`.
template <template <class, int, TileForm> class Kernels, Sweep sweep, class T, int dim, class Start>
void with_form(TileForm form, Start start) {
  if constexpr (has_form(dtype_of<T>, sweep, dim, TileForm::tall))
    if (form == TileForm::tall) return start(Kernels<T, dim, TileForm::tall>{});
  if constexpr (has_form(dtype_of<T>, sweep, dim, TileForm::narrow))
    if (form == TileForm::narrow) return start(Kernels<T, dim, TileForm::narrow>{});
  start(Kernels<T, dim, TileForm::wide>{});
}
template <template <class, int, TileForm> class Kernels, Sweep sweep, class T, class Start>
void with_dim(int64_t widest_dim, TileForm form, Start start) {
  switch (tile_dim_for(widest_dim)) {
    case 64:
      return with_form<Kernels, sweep, T, 64>(form, start);
    case 96:
      return with_form<Kernels, sweep, T, 96>(form, start);
    case 128:
      return with_form<Kernels, sweep, T, 128>(form, start);
    default:
      return with_form<Kernels, sweep, T, 256>(form, start);
  }
}
template <template <class, int, TileForm> class Kernels, Sweep sweep, class Start>
void with_kernel(DType type, int64_t widest_dim, TileForm form, Start start) {
  if (type == DType::bf16)
    with_dim<Kernels, sweep, bf16>(widest_dim, form, start);
  else
    with_dim<Kernels, sweep, float>(widest_dim, form, start);
}

}  // namespace gyre
