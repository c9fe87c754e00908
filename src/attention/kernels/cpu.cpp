// Flash attention on one core.
//
//     for every band of rows under the same rectangles, for every KV head,
//     for every tile of up to 64 lanes (query rows x the query heads of that KV head):
//       for every rectangle that covers the tile, for every block of visible keys:
//         scores [key][lane]   = K [key][d] · Q [d][lane]         libxsmm, reads K where it lies
//         scores               = exp(scores - top), online        lane_ops, all reductions vertical
//         out    [d][lane]    += Vᵀ [d][key] · scores [key][lane]   libxsmm, reads V where it lies
//       merge (out, top + log sum) into the state
//
// With lanes along the vectors neither keys nor values are copied or transposed; only the tile's
// queries and its result are, once per tile. Key counts need no padding. Blocks outside the mask
// are never touched; on the diagonal, blocks are 16 keys and leave out the lanes that see none of
// them, in steps of 16.

#include <libxsmm.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/kernels/lane_ops.hpp"
#include "core/error.hpp"
#include "core/index.hpp"
#include "runtime/buffer.hpp"

namespace gyre {
namespace {

constexpr int64_t key_tile = 64;
constexpr int64_t diagonal_block = 16;
constexpr int64_t nothing_hidden = -key_tile;
constexpr double flops_between_progress = 2.5e6;  // 15 to 40 µs
constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// Generated products, by number of lanes and number of keys; made when first used. A count of keys
/// is a multiple of 16 or below 16, so that ragged documents share few of them.
class Products {
 public:
  void set_shape(int64_t head_dim, int64_t key_stride, int64_t value_stride) {
    if (head_dim == head_dim_ && key_stride == key_stride_ && value_stride == value_stride_) return;
    constexpr int64_t limit = std::numeric_limits<libxsmm_blasint>::max();
    GYRE_CHECK(std::max(key_stride, value_stride) <= limit, "strides {}, {}", key_stride,
               value_stride);
    head_dim_ = head_dim;
    key_stride_ = key_stride;
    value_stride_ = value_stride;
    for (auto& kernels : scores_) kernels.fill(nullptr);
    for (auto& kernels : outputs_) kernels.fill(nullptr);
  }

  /// scores [keys][lane] = K · Q
  void score(const float* packed_queries, const float* keys, float* scores, int64_t lanes,
             int64_t count) {
    for_pieces(count, [&](int64_t begin, int64_t piece) {
      libxsmm_smmfunction& kernel = slot(scores_, lanes, piece);
      if (kernel == nullptr)
        kernel = generate(lanes, piece, head_dim_, key_stride_, LIBXSMM_GEMM_FLAG_NONE, 0);
      kernel(packed_queries, keys + begin * key_stride_, scores + begin * lane_stride);
    });
  }

  /// out [d][lane] += Vᵀ · weights
  void accumulate(const float* weights, const float* values, float* out, int64_t lanes,
                  int64_t count) {
    for_pieces(count, [&](int64_t begin, int64_t piece) {
      libxsmm_smmfunction& kernel = slot(outputs_, lanes, piece);
      if (kernel == nullptr)
        kernel = generate(lanes, head_dim_, piece, value_stride_, LIBXSMM_GEMM_FLAG_TRANS_B, 1);
      kernel(weights + begin * lane_stride, values + begin * value_stride_, out);
    });
  }

 private:
  using Table =
      std::array<std::array<libxsmm_smmfunction, key_tile + 1>, lane_stride / lane_granularity>;

  template <class Body>
  static void for_pieces(int64_t count, Body body) {
    const int64_t even = count / lane_granularity * lane_granularity;
    if (even > 0) body(int64_t{0}, even);
    if (count > even) body(even, count - even);
  }

  static libxsmm_smmfunction& slot(Table& table, int64_t lanes, int64_t keys) {
    return table[static_cast<size_t>(lanes / lane_granularity - 1)][static_cast<size_t>(keys)];
  }

  static libxsmm_smmfunction generate(int64_t m, int64_t n, int64_t k, int64_t stride, int flags,
                                      float beta) {
    const auto narrow = [](int64_t x) { return static_cast<libxsmm_blasint>(x); };
    const libxsmm_blasint ld_lanes = narrow(lane_stride), ld = narrow(stride);
    const float alpha = 1;
    const int prefetch = LIBXSMM_PREFETCH_NONE;
    const libxsmm_smmfunction kernel =
        libxsmm_smmdispatch(narrow(m), narrow(n), narrow(k), &ld_lanes, &ld, &ld_lanes, &alpha,
                            &beta, &flags, &prefetch);
    if (kernel == nullptr)
      throw_runtime("libxsmm has no f32 kernel for {} x {} x {} on this processor", m, n, k);
    return kernel;
  }

  int64_t head_dim_ = -1, key_stride_ = -1, value_stride_ = -1;
  Table scores_{}, outputs_{};
};

/// Query rows [begin, end) that are covered by the same rectangles: indices [first, last) of a
/// list.
struct Band {
  int64_t begin, end;
  size_t first, last;
};

/// Cuts the query rows at every edge of a rectangle. `members` receives the rectangles of all
/// bands.
std::vector<Band> cut_into_bands(std::span<const Rectangle> rectangles,
                                 std::vector<size_t>& members) {
  const auto end_of = [](const Rectangle& r) { return r.q_begin.value() + r.q_length; };
  std::vector<int64_t> edges;
  for (const Rectangle& r : rectangles)
    if (r.q_length > 0 && r.k_length > 0) edges.insert(edges.end(), {r.q_begin.value(), end_of(r)});
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());

  std::vector<Band> bands;
  std::vector<size_t> active;
  size_t next = 0;
  for (size_t e = 0; e + 1 < edges.size(); ++e) {
    std::erase_if(active, [&](size_t i) { return end_of(rectangles[i]) <= edges[e]; });
    for (; next < rectangles.size() && rectangles[next].q_begin.value() <= edges[e]; ++next)
      if (rectangles[next].k_length > 0 && end_of(rectangles[next]) > edges[e])
        active.push_back(next);
    if (active.empty()) continue;
    bands.push_back({edges[e], edges[e + 1], members.size(), members.size() + active.size()});
    members.insert(members.end(), active.begin(), active.end());
  }
  return bands;
}

/// Lane i is row row_begin + i / heads, query head head_begin + i % heads.
struct Tile {
  int64_t row_begin, rows, head_begin, heads, kv_head;
  std::span<const size_t> rectangles;  // that cover it
  int64_t lanes() const { return rows * heads; }
  int64_t padded() const { return round_up(lanes(), lane_granularity); }
};

/// Bands outermost, so that rows of short documents are touched while they are in cache; within a
/// band all tiles of one KV head follow each other and find its keys and values there.
std::vector<Tile> cut_into_tiles(const HeadShape& shape, const std::vector<Band>& bands,
                                 std::span<const size_t> members) {
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t heads_at_once = std::min(group, lane_stride);
  const int64_t rows_at_once = lane_stride / heads_at_once;
  std::vector<Tile> tiles;
  for (const Band& band : bands)
    for (int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head)
      for (int64_t row = band.begin; row < band.end; row += rows_at_once)
        for (int64_t head = 0; head < group; head += heads_at_once)
          tiles.push_back({row, std::min(rows_at_once, band.end - row), kv_head * group + head,
                           std::min(heads_at_once, group - head), kv_head,
                           members.subspan(band.first, band.last - band.first)});
  return tiles;
}

class CpuKernel final : public BlockKernel {
 public:
  void forward(const HeadShape& shape, MatrixView<const float> queries, const KvBlock& block,
               std::span<const Rectangle> rectangles, AttentionState& state,
               const std::function<void()>& progress) override;

 private:
  /// Keys [begin, begin + count) of the block meet the lanes from `lane` on.
  struct KeyRange {
    int64_t begin, count, lane;
  };
  struct Call {
    const HeadShape& shape;
    MatrixView<const float> queries;
    const KvBlock& block;
    AttentionState& state;
    const std::function<void()>& progress;
  };

  void reserve(int64_t head_dim);
  void begin_tile(const Call& call, const Tile& tile);
  void attend(const Call& call, const Tile& tile, const Rectangle& r);
  /// Key number i of the range is hidden from the tile's first `hidden_rows` + i rows, if positive.
  void attend_keys(const Call& call, const Tile& tile, KeyRange keys, int64_t hidden_rows);
  void end_tile(const Call& call, const Tile& tile);
  void account(const Call& call, double flops);
  void prefetch(MatrixView<const float> rows, const Tile& tile) const;
  LaneState lanes_from(int64_t lane) {
    return {top_.data() + lane, sum_.data() + lane, out_.data() + lane, head_dim_};
  }

  Products products_;
  Buffer<float> packed_queries_, scores_, out_, top_, sum_, zeros_;
  int64_t head_dim_ = 0;
  double flops_since_progress_ = 0;
};

void CpuKernel::reserve(int64_t head_dim) {
  if (head_dim == head_dim_) return;
  head_dim_ = head_dim;
  packed_queries_ = Buffer<float>(head_dim * lane_stride);
  out_ = Buffer<float>(head_dim * lane_stride);
  scores_ = Buffer<float>(key_tile * lane_stride);
  top_ = Buffer<float>(lane_stride);
  sum_ = Buffer<float>(lane_stride);
  zeros_ = Buffer<float>(head_dim);
  std::fill_n(zeros_.data(), head_dim, 0.0F);
}

void CpuKernel::begin_tile(const Call& call, const Tile& tile) {
  std::array<const float*, lane_stride> rows;
  size_t lane = 0;
  for (int64_t r = tile.row_begin; r < tile.row_begin + tile.rows; ++r)
    for (int64_t h = tile.head_begin; h < tile.head_begin + tile.heads; ++h)
      rows[lane++] = call.queries.row(r) + h * head_dim_;
  while (lane < static_cast<size_t>(tile.padded())) rows[lane++] = zeros_.data();
  pack_lanes(rows.data(), tile.padded(), head_dim_, call.shape.scale, packed_queries_.data());
  std::fill_n(top_.data(), tile.padded(), minus_infinity);
  std::fill_n(sum_.data(), tile.padded(), 0.0F);
  for (int64_t d = 0; d < head_dim_; ++d)
    std::fill_n(out_.data() + d * lane_stride, tile.padded(), 0.0F);
  prefetch(call.state.out, tile);  // for end_tile
  account(call, 16.0 * static_cast<double>(head_dim_ * lane_stride));
}

void CpuKernel::attend(const Call& call, const Tile& tile, const Rectangle& r) {
  const int64_t first_row = tile.row_begin - r.q_begin.value();
  // Keys below `open` are visible to every row of the tile, those from `end` on to none.
  int64_t open = r.k_length, end = r.k_length;
  const int64_t diagonal = r.mask.diagonal + first_row;  // of the tile's first row
  if (r.mask.causal) {
    open = std::clamp<int64_t>(diagonal + 1, 0, r.k_length);
    end = std::clamp<int64_t>(diagonal + tile.rows, 0, r.k_length);
  }
  int64_t j = 0;
  const int64_t unmasked = open == end ? end : open / diagonal_block * diagonal_block;
  for (; j < unmasked; j += key_tile)
    attend_keys(call, tile, {r.k_begin.value() + j, std::min(key_tile, unmasked - j), 0},
                nothing_hidden);
  for (j = unmasked; j < end; j += diagonal_block) {
    const int64_t count = std::min(diagonal_block, end - j);
    const int64_t first_lane = std::max<int64_t>(j - diagonal, 0) * tile.heads;
    const int64_t lane = first_lane / lane_granularity * lane_granularity;
    attend_keys(call, tile, {r.k_begin.value() + j, count, lane}, j - diagonal);
  }
}

void CpuKernel::attend_keys(const Call& call, const Tile& tile, KeyRange keys,
                            int64_t hidden_rows) {
  const int64_t lanes = tile.padded() - keys.lane;
  const int64_t column = tile.kv_head * head_dim_;
  float* scores = scores_.data() + keys.lane;
  products_.score(packed_queries_.data() + keys.lane, call.block.keys.row(keys.begin) + column,
                  scores, lanes, keys.count);
  for (int64_t i = 0; i < keys.count; ++i) {
    const int64_t hidden = (hidden_rows + i) * tile.heads - keys.lane;
    if (hidden > 0) std::fill_n(scores + i * lane_stride, hidden, minus_infinity);
  }
  softmax_tile(scores, keys.count, lanes, lanes_from(keys.lane));
  products_.accumulate(scores, call.block.values.row(keys.begin) + column, out_.data() + keys.lane,
                       lanes, keys.count);
  account(call, 4.0 * static_cast<double>(lanes * keys.count * head_dim_));
}

void CpuKernel::end_tile(const Call& call, const Tile& tile) {
  std::array<float*, lane_stride> rows;
  std::array<float*, lane_stride> lse;
  size_t lane = 0;
  for (int64_t r = tile.row_begin; r < tile.row_begin + tile.rows; ++r)
    for (int64_t h = tile.head_begin; h < tile.head_begin + tile.heads; ++h, ++lane) {
      rows[lane] = call.state.out.row(r) + h * head_dim_;
      lse[lane] = call.state.lse.row(r) + h;
    }
  merge_lanes(lanes_from(0), tile.lanes(), rows.data(), lse.data());
}

/// Rows of short documents come from memory, in pieces too short for the hardware to foresee.
void CpuKernel::prefetch(MatrixView<const float> rows, const Tile& tile) const {
  constexpr int64_t line = 64 / sizeof(float);
  for (int64_t r = tile.row_begin; r < tile.row_begin + tile.rows; ++r)
    for (int64_t i = 0; i < tile.heads * head_dim_; i += line)
      __builtin_prefetch(rows.row(r) + tile.head_begin * head_dim_ + i, 0, 2);
}

void CpuKernel::account(const Call& call, double flops) {
  flops_since_progress_ += flops;
  if (flops_since_progress_ < flops_between_progress) return;
  flops_since_progress_ = 0;
  if (call.progress) call.progress();
}

void CpuKernel::forward(const HeadShape& shape, MatrixView<const float> queries,
                        const KvBlock& block, std::span<const Rectangle> rectangles,
                        AttentionState& state, const std::function<void()>& progress) {
  GYRE_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0,
             "{} heads over {} KV heads", shape.heads, shape.kv_heads);
  GYRE_CHECK(
      std::is_sorted(rectangles.begin(), rectangles.end(),
                     [](const Rectangle& a, const Rectangle& b) { return a.q_begin < b.q_begin; }),
      "rectangles are not sorted by their first query");
  std::vector<size_t> members;
  const std::vector<Band> bands = cut_into_bands(rectangles, members);
  const std::vector<Tile> tiles = cut_into_tiles(shape, bands, members);
  if (tiles.empty()) return;
  reserve(shape.head_dim);
  products_.set_shape(shape.head_dim, block.keys.stride, block.values.stride);
  const Call call{shape, queries, block, state, progress};
  for (size_t i = 0; i < tiles.size(); ++i) {
    begin_tile(call, tiles[i]);
    if (i + 1 < tiles.size()) prefetch(call.queries, tiles[i + 1]);
    for (const size_t r : tiles[i].rectangles) attend(call, tiles[i], rectangles[r]);
    end_tile(call, tiles[i]);
  }
}

}  // namespace

std::unique_ptr<BlockKernel> make_cpu_kernel() {
  return std::make_unique<CpuKernel>();
}

}  // namespace gyre
