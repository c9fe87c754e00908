#include "attention/kernels/tile_worker.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "attention/kernels/lane_ops.hpp"
#include "attention/kernels/row_access.hpp"
#include "core/index.hpp"
#include "core/special_values.hpp"

namespace gyre {
namespace {

/// Distance between rows as libxsmm requires it: at least their length, even for a single row.
template <class Matrix>
int64_t row_stride(const Matrix& m) {
  return std::max(m.stride, m.cols);
}

/// Whether f32 rows fall into the same sets of an L1 cache with 64 sets of 64-byte lines: most of a
/// block of 64 rows is then evicted before it is read again.
bool share_cache_sets(int64_t stride) {
  return stride * sizeof(float) % 4096 == 0;
}

}  // namespace

void TileWorker::start(int64_t head_dim, int64_t value_dim, Progress progress) {
  progress_ = progress;
  head_dim_ = head_dim;
  value_dim_ = value_dim;
  widest_dim_ = std::max(head_dim, value_dim);
  reserve(scores_, key_tile * lane_stride);
  reserve(d_scores_, key_tile * lane_stride);
  reserve(row_scratch_, lane_stride * widest_dim_);
}

Products& TileWorker::products(int64_t dim, int64_t stride) {
  constexpr size_t most = 16;  // a call uses up to five; least recently used ones are dropped
  for (auto p = products_.begin(); p != products_.end(); ++p)
    if (p->serves(dim, stride)) {
      products_.splice(products_.begin(), products_, p);
      return *p;
    }
  if (products_.size() >= most) products_.pop_back();
  return products_.emplace_front(dim, stride);
}

void TileWorker::prefetch_tile(ConstMatrixRef from, const Tile& tile, int64_t dim) {
  prefetch(from, tile.row_begin, tile.rows, tile.head_begin * dim, tile.heads * dim);
}

/// Walks the key ranges of a batch. open(key ranges) for each key block returns its KeyPanels;
/// begin(tile, slot) runs before the first key range of a tile and end(tile, slot) after its last;
/// each_block(...) for every score block; close(keys) at the end of a key block. A slot holds the
/// arrays of a tile between begin and end. Slots are reused, so that the arrays of short documents
/// stay in the L1 cache.
template <class Open, class Begin, class EachBlock, class End, class Close>
void TileWorker::walk(const TileSweep& sweep, const TileBatch& batch, Open open, Begin begin,
                      EachBlock each_block, End end, Close close) {
  std::array<size_t, largest_batch> ranges_left{}, slot_of{}, free_slots;
  for (const KeyRange& v : key_ranges_) ++ranges_left[v.tile];
  std::iota(free_slots.rbegin(), free_slots.rend(), size_t{0});  // used as a stack
  size_t free_count = free_slots.size();
  std::array<bool, largest_batch> begun{};
  for (size_t first = 0; first < key_ranges_.size();) {
    size_t last = first;
    while (last < key_ranges_.size() && key_ranges_[last].key_block == key_ranges_[first].key_block)
      ++last;
    const KeyPanels keys = open(std::span(key_ranges_).subspan(first, last - first));
    for (; first < last; ++first) {
      const KeyRange& key_range = key_ranges_[first];
      const Tile& tile = batch.tiles[key_range.tile];
      size_t& slot = slot_of[key_range.tile];
      if (!begun[key_range.tile]) {
        slot = free_slots[--free_count];
        begin(tile, slot);
        begun[key_range.tile] = true;
      }
      sweep.cut(tile, key_range, score_blocks_);
      for (const ScoreBlock& p : score_blocks_.score_blocks)
        each_block(tile, p, key_range.rectangle->k_begin + p.begin - keys.begin, keys, slot);
      if (--ranges_left[key_range.tile] == 0) {
        end(tile, slot);
        free_slots[free_count++] = slot;
      }
    }
    close(keys);
  }
}

KeyPanels TileWorker::open_key_block(const BlockInput& in, const TileSweep& sweep, int64_t kv_head,
                                     std::span<const KeyRange> key_ranges) {
  KeyPanels keys;
  keys.begin = std::numeric_limits<int64_t>::max();
  for (const KeyRange& v : key_ranges) {
    keys.begin = std::min(keys.begin, v.rectangle->k_begin + v.begin);
    keys.end = std::max(keys.end, v.rectangle->k_begin + v.end);
  }
  const int64_t column = kv_head * head_dim_, v_column = kv_head * value_dim_;
  keys.k_stride = row_stride(in.k), keys.v_stride = row_stride(in.v);
  if (in.k.type != DType::f32 || sweep.fixed_tiles() || share_cache_sets(keys.k_stride)) {
    const int64_t count = keys.end - keys.begin;
    const int64_t padded = sweep.fixed_tiles() ? round_up(count, key_tile) : count;
    reserve(k_panel_, largest_key_block * head_dim_);
    reserve(v_panel_, largest_key_block * value_dim_);
    for (int64_t i = 0; i < count; ++i) {
      load_row(in.k, keys.begin + i, column, head_dim_, 1, k_panel_.data() + i * head_dim_);
      load_row(in.v, keys.begin + i, v_column, value_dim_, 1, v_panel_.data() + i * value_dim_);
    }
    std::fill(k_panel_.data() + count * head_dim_, k_panel_.data() + padded * head_dim_, 0.0F);
    std::fill(v_panel_.data() + count * value_dim_, v_panel_.data() + padded * value_dim_, 0.0F);
    keys.k = k_panel_.data(), keys.v = v_panel_.data();
    keys.k_stride = head_dim_, keys.v_stride = value_dim_;
    progress_.account(4.0 * (count * (head_dim_ + value_dim_)));
  } else {
    keys.k = in.k.as<float>().row(keys.begin) + column;
    keys.v = in.v.as<float>().row(keys.begin) + v_column;
    const int64_t count = std::min(keys.end - keys.begin, key_tile);
    prefetch(in.k, keys.begin, count, column, head_dim_);
    prefetch(in.v, keys.begin, count, v_column, value_dim_);
  }
  keys.k_products = &products(head_dim_, keys.k_stride);
  keys.v_products = &products(value_dim_, keys.v_stride);
  return keys;
}

void TileWorker::forward(const ForwardBlock& block, const TileSweep& sweep,
                         const TileBatch& batch) {
  const auto tiles = std::ssize(batch.tiles);
  for (Buffer<float>* buffer : {&packed_, &out_})
    reserve(*buffer, tiles * widest_dim_ * lane_stride);
  for (Buffer<float>* buffer : {&top_, &sum_}) reserve(*buffer, tiles * lane_stride);
  sweep.list_key_ranges(batch, all_key_blocks, key_ranges_);
  walk(
      sweep, batch,
      [&](std::span<const KeyRange> some) {
        return open_key_block(block, sweep, batch.kv_head, some);
      },
      [&](const Tile& tile, size_t slot) {
        begin_forward(block, tile, sweep.padded_lanes(tile), slot);
        if (const Tile* next = sweep.next(tile)) prefetch_tile(block.q, *next, head_dim_);
      },
      [&](const Tile& tile, const ScoreBlock& score_block, int64_t key, const KeyPanels& keys,
          size_t slot) { attend(tile, score_block, key, keys, slot); },
      [&](const Tile& tile, size_t slot) { end_forward(block, tile, slot); },
      [](const KeyPanels&) {});
}

void TileWorker::begin_forward(const ForwardBlock& block, const Tile& tile, int64_t padded,
                               size_t slot) {
  std::array<const float*, lane_stride> rows;
  size_t lane = 0;
  for (int64_t r = tile.row_begin; r < tile.row_begin + tile.rows; ++r)
    for (int64_t h = tile.head_begin; h < tile.head_begin + tile.heads; ++h, ++lane) {
      float* scratch = row_scratch_.data() + lane * head_dim_;
      if (block.q.type == DType::f32) {
        rows[lane] = block.q.as<float>().row(r) + h * head_dim_;
      } else {
        load_row(block.q, r, h * head_dim_, head_dim_, 1, scratch);
        rows[lane] = scratch;
      }
    }
  float* packed = tile_array(packed_, slot);
  if (tile.lanes() < padded) {
    float* zeros = row_scratch_.data() + (lane_stride - 1) * head_dim_;
    std::fill_n(zeros, head_dim_, 0.0F);
    while (lane < static_cast<size_t>(padded)) rows[lane++] = zeros;
  }
  pack_lanes(rows.data(), padded, head_dim_, block.heads.scale, packed);
  std::fill_n(lane_array(top_, slot), padded, -infinity_of<float>);
  std::fill_n(lane_array(sum_, slot), padded, 0.0F);
  float* out = tile_array(out_, slot);
  for (int64_t d = 0; d < value_dim_; ++d) std::fill_n(out + d * lane_stride, padded, 0.0F);
  prefetch_tile(block.out, tile, value_dim_);  // used by end_forward
  progress_.account(8.0 * ((head_dim_ + value_dim_) * lane_stride));
}

/// The first key of the score block is row `key` of `keys`.
void TileWorker::attend(const Tile& tile, const ScoreBlock& score_block, int64_t key,
                        const KeyPanels& keys, size_t slot) {
  const int64_t lane = score_block.lane_begin, lanes = score_block.lanes();
  float* scores = scores_.data() + lane;
  keys.k_products->score(tile_array(packed_, slot) + lane, keys.k + key * keys.k_stride, scores,
                         lanes, score_block.count);
  if (score_block.masked)
    hide(tile, score_blocks_, score_block, -infinity_of<float>, scores_.data());
  float* out = tile_array(out_, slot) + lane;
  softmax_tile(scores, score_block.count, lanes,
               {lane_array(top_, slot) + lane, lane_array(sum_, slot) + lane, out, value_dim_});
  keys.v_products->to_lanes(scores, keys.v + key * keys.v_stride, out, lanes, score_block.count);
  progress_.account(2.0 * (lanes * score_block.count * (head_dim_ + value_dim_)));
}

void TileWorker::end_forward(const ForwardBlock& block, const Tile& tile, size_t slot) {
  std::array<float*, lane_stride> rows;
  std::array<float*, lane_stride> lse;
  const bool direct = block.out.type == DType::f32;
  const auto for_each_lane = [&](auto body) {
    for (int64_t lane = 0; lane < tile.lanes(); ++lane)
      body(lane, tile.row_begin + lane / tile.heads, tile.head_begin + lane % tile.heads);
  };
  for_each_lane([&](size_t lane, int64_t row, int64_t head) {
    lse[lane] = block.lse.row(row) + head;
    if (direct) {
      rows[lane] = block.out.as<float>().row(row) + head * value_dim_;
    } else {
      rows[lane] = row_scratch_.data() + lane * value_dim_;
      load_row(block.out, row, head * value_dim_, value_dim_, 1, rows[lane]);
    }
  });
  float* sum = lane_array(sum_, slot);
  merge_lanes({lane_array(top_, slot), sum, tile_array(out_, slot), value_dim_}, tile.lanes(),
              rows.data(), lse.data());
  if (direct) return;
  for_each_lane([&](size_t lane, int64_t row, int64_t head) {
    if (sum[lane] != 0) store_row(rows[lane], row, head * value_dim_, value_dim_, block.out);
  });
}

void TileWorker::backward(const BackwardBlock& block, const TileSweep& sweep,
                          const TileBatch& batch, Gradients wanted, size_t only_key_block) {
  const auto tiles = std::ssize(batch.tiles);
  for (Buffer<float>* buffer : {&packed_, &packed_d_out_, &rows_, &d_out_rows_, &out_})
    reserve(*buffer, tiles * widest_dim_ * lane_stride);
  for (Buffer<float>* buffer : {&top_, &sum_}) reserve(*buffer, tiles * lane_stride);
  sweep.list_key_ranges(batch, only_key_block, key_ranges_);
  walk(
      sweep, batch,
      [&](std::span<const KeyRange> some) {
        KeyPanels keys = open_key_block(block, sweep, batch.kv_head, some);
        if (wanted.keys) open_gradients(block, sweep, batch.kv_head, keys);
        return keys;
      },
      [&](const Tile& tile, size_t slot) {
        begin_backward(block, tile, sweep.padded_lanes(tile), slot);
        if (const Tile* next = sweep.next(tile)) {
          prefetch_tile(block.q, *next, head_dim_);
          prefetch_tile(block.d_out, *next, value_dim_);
        }
      },
      [&](const Tile& tile, const ScoreBlock& score_block, int64_t key, const KeyPanels& keys,
          size_t slot) { differentiate(tile, score_block, key, keys, slot, wanted); },
      [&](const Tile& tile, size_t slot) {
        if (wanted.queries) end_backward(block, tile, slot);
      },
      [&](const KeyPanels& keys) {
        if (keys.gradients_apart) add_gradients(block, batch.kv_head, keys);
      });
}

void TileWorker::open_gradients(const BackwardBlock& block, const TileSweep& sweep, int64_t kv_head,
                                KeyPanels& keys) {
  keys.d_k_stride = row_stride(block.d_k), keys.d_v_stride = row_stride(block.d_v);
  if (sweep.fixed_tiles() || share_cache_sets(keys.d_k_stride)) {
    const int64_t rows = round_up(keys.end - keys.begin, key_tile);
    for (const auto& [panel, dim] :
         {std::pair{&d_k_panel_, head_dim_}, {&d_v_panel_, value_dim_}}) {
      reserve(*panel, largest_key_block * dim);
      std::fill_n(panel->data(), rows * dim, 0.0F);
    }
    keys.d_k = d_k_panel_.data(), keys.d_v = d_v_panel_.data();
    keys.d_k_stride = head_dim_, keys.d_v_stride = value_dim_;
    keys.gradients_apart = true;
  } else {
    keys.d_k = block.d_k.row(keys.begin) + kv_head * head_dim_;
    keys.d_v = block.d_v.row(keys.begin) + kv_head * value_dim_;
  }
  keys.d_k_products = &products(head_dim_, keys.d_k_stride);
  keys.d_v_products = &products(value_dim_, keys.d_v_stride);
}

void TileWorker::add_gradients(const BackwardBlock& block, int64_t kv_head, const KeyPanels& keys) {
  for (int64_t i = 0; i < keys.end - keys.begin; ++i) {
    float* d_k = block.d_k.row(keys.begin + i) + kv_head * head_dim_;
    float* d_v = block.d_v.row(keys.begin + i) + kv_head * value_dim_;
    for (int64_t d = 0; d < head_dim_; ++d) d_k[d] += keys.d_k[i * head_dim_ + d];
    for (int64_t d = 0; d < value_dim_; ++d) d_v[d] += keys.d_v[i * value_dim_ + d];
  }
  progress_.account(4.0 * ((keys.end - keys.begin) * (head_dim_ + value_dim_)));
}

void TileWorker::begin_backward(const BackwardBlock& block, const Tile& tile, int64_t padded,
                                size_t slot) {
  float *q_rows = tile_array(rows_, slot), *d_out_rows = tile_array(d_out_rows_, slot);
  float *lse = lane_array(top_, slot), *delta = lane_array(sum_, slot);
  std::array<const float*, lane_stride> q, d_out;
  for (int64_t lane = 0; lane < padded; ++lane) {
    const size_t at = lane;
    const int64_t row = tile.row_begin + lane / tile.heads;
    const int64_t head = tile.head_begin + lane % tile.heads;
    float *q_row = q_rows + lane * head_dim_, *d_out_row = d_out_rows + lane * value_dim_;
    q[at] = q_row, d_out[at] = d_out_row;
    if (lane < tile.lanes() && block.lse(row, head) != -infinity_of<float>) {
      load_row(block.q, row, head * head_dim_, head_dim_, block.heads.scale, q_row);
      load_row(block.d_out, row, head * value_dim_, value_dim_, 1, d_out_row);
      lse[lane] = block.lse(row, head);
      delta[lane] = block.delta(row, head);
    } else {  // no gradient: the row gets weight 0 for any contents
      std::fill_n(q_row, head_dim_, 0.0F);
      std::fill_n(d_out_row, value_dim_, 0.0F);
      lse[lane] = infinity_of<float>;
      delta[lane] = 0;
    }
  }
  pack_lanes(q.data(), padded, head_dim_, 1, tile_array(packed_, slot));
  pack_lanes(d_out.data(), padded, value_dim_, 1, tile_array(packed_d_out_, slot));
  float* d_q = tile_array(out_, slot);
  for (int64_t d = 0; d < head_dim_; ++d) std::fill_n(d_q + d * lane_stride, padded, 0.0F);
  progress_.account(16.0 * ((head_dim_ + value_dim_) * lane_stride));
}

/// The first key of the score block is row `key` of `keys`.
void TileWorker::differentiate(const Tile& tile, const ScoreBlock& score_block, int64_t key,
                               const KeyPanels& keys, size_t slot, Gradients wanted) {
  const int64_t lane = score_block.lane_begin, lanes = score_block.lanes(),
                count = score_block.count;
  const double of_keys = 2.0 * (lanes * count * head_dim_),
               of_values = 2.0 * (lanes * count * value_dim_);
  float *p = scores_.data() + lane, *ds = d_scores_.data() + lane;
  const float *k = keys.k + key * keys.k_stride, *v = keys.v + key * keys.v_stride;
  keys.k_products->score(tile_array(packed_, slot) + lane, k, p, lanes, count);
  keys.v_products->score(tile_array(packed_d_out_, slot) + lane, v, ds, lanes, count);
  progress_.account(of_keys + of_values);
  gradient_tile(p, ds, count, lanes, lane_array(top_, slot) + lane, lane_array(sum_, slot) + lane);
  if (score_block.masked) {
    hide(tile, score_blocks_, score_block, 0, scores_.data());
    hide(tile, score_blocks_, score_block, 0, d_scores_.data());
  }
  if (wanted.keys) {
    keys.d_v_products->to_keys(p, tile_array(d_out_rows_, slot) + lane * value_dim_,
                               keys.d_v + key * keys.d_v_stride, lanes, count);
    keys.d_k_products->to_keys(ds, tile_array(rows_, slot) + lane * head_dim_,
                               keys.d_k + key * keys.d_k_stride, lanes, count);
    progress_.account(of_keys + of_values);
  }
  if (wanted.queries) {
    keys.k_products->to_lanes(ds, k, tile_array(out_, slot) + lane, lanes, count);
    progress_.account(of_keys);
  }
}

void TileWorker::end_backward(const BackwardBlock& block, const Tile& tile, size_t slot) {
  std::array<float*, lane_stride> rows = {};
  const bool direct = block.d_q.type == DType::f32;
  for (int64_t lane = 0; lane < tile.lanes(); ++lane) {
    const int64_t row = tile.row_begin + lane / tile.heads;
    const int64_t column = (tile.head_begin + lane % tile.heads) * head_dim_;
    float*& to = rows[lane];
    to = direct ? block.d_q.as<float>().row(row) + column : row_scratch_.data() + lane * head_dim_;
    if (!direct) load_row(block.d_q, row, column, head_dim_, 1, to);
  }
  add_lanes(tile_array(out_, slot), tile.lanes(), head_dim_, block.heads.scale, rows.data());
  if (direct) return;
  for (int64_t lane = 0; lane < tile.lanes(); ++lane)
    store_row(rows[lane], tile.row_begin + lane / tile.heads,
              (tile.head_begin + lane % tile.heads) * head_dim_, head_dim_, block.d_q);
}

}  // namespace gyre
