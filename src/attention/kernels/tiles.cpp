#include "attention/kernels/tiles.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/index.hpp"

namespace gyre {
namespace {

constexpr int64_t diagonal_block = 16;

int64_t q_end(const Rectangle& r) {
  return r.q_begin + r.q_length;
}

/// Keys that the rows of a tile see, clipped to the rectangle: all rows see [open_begin, open_end),
/// no row sees keys outside [begin, end).
struct KeyLimits {
  int64_t begin, open_begin, open_end, end;
};

KeyLimits key_limits(const Tile& tile, const Rectangle& r) {
  const int64_t first = tile.row_begin - r.q_begin, last = first + tile.rows - 1;
  const auto clip = [&](int64_t key) { return std::clamp<int64_t>(key, 0, r.k_length); };
  return {clip(r.mask.begin_key(first)), clip(r.mask.begin_key(last)), clip(r.mask.end_key(first)),
          clip(r.mask.end_key(last))};
}

void set_row_limits(const Tile& tile, const Rectangle& r, ScoreBlocks& list) {
  const int64_t first = tile.row_begin - r.q_begin;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const size_t at = i;
    list.begin[at] = std::clamp<int64_t>(r.mask.begin_key(first + i), 0, r.k_length);
    list.end[at] = std::clamp<int64_t>(r.mask.end_key(first + i), 0, r.k_length);
  }
}

/// Rows [first, second) of the tile that see any key in [key_begin, key_end).
std::pair<int64_t, int64_t> rows_that_see(const Tile& tile, const ScoreBlocks& list,
                                          int64_t key_begin, int64_t key_end) {
  const auto begins = list.begin.begin(), ends = list.end.begin();
  return {std::upper_bound(ends, ends + tile.rows, key_begin) - ends,
          std::lower_bound(begins, begins + tile.rows, key_end) - begins};
}

}  // namespace

TileSweep::TileSweep(const BlockHeads& heads, std::span<const Rectangle> rectangles,
                     bool fixed_tiles, int64_t tiles_per_batch)
    : fixed_tiles_(fixed_tiles) {
  cut_bands(rectangles);
  cut_key_blocks(rectangles);
  cut_tiles(heads, tiles_per_batch);
}

void TileSweep::cut_bands(std::span<const Rectangle> rectangles) {
  std::vector<int64_t> edges;
  for (const Rectangle& r : rectangles)
    if (r.q_length > 0 && r.k_length > 0) edges.insert(edges.end(), {r.q_begin, q_end(r)});
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());

  std::vector<const Rectangle*> active;
  size_t next = 0;
  for (size_t e = 0; e + 1 < edges.size(); ++e) {
    std::erase_if(active, [&](const Rectangle* r) { return q_end(*r) <= edges[e]; });
    for (; next < rectangles.size() && rectangles[next].q_begin <= edges[e]; ++next)
      if (rectangles[next].k_length > 0 && q_end(rectangles[next]) > edges[e])
        active.push_back(&rectangles[next]);
    if (active.empty()) continue;
    bands_.push_back({edges[e], edges[e + 1], members_.size(), members_.size() + active.size()});
    members_.insert(members_.end(), active.begin(), active.end());
  }
}

void TileSweep::cut_key_blocks(std::span<const Rectangle> rectangles) {
  std::vector<int64_t> edges;
  for (const Rectangle& r : rectangles)
    if (r.q_length > 0 && r.k_length > 0)
      edges.insert(edges.end(), {r.k_begin, r.k_begin + r.k_length});
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  if (edges.empty()) return;

  int64_t begin = edges.front(), last = begin;
  for (const int64_t edge : edges) {
    if (edge - begin > largest_key_block && last > begin) {
      key_blocks_.push_back({begin, last});
      begin = last;
    }
    for (; edge - begin > largest_key_block; begin += largest_key_block)
      key_blocks_.push_back({begin, begin + largest_key_block});
    last = edge;
  }
  if (last > begin) key_blocks_.push_back({begin, last});
}

void TileSweep::cut_tiles(const BlockHeads& heads, int64_t tiles_per_batch) {
  struct Range {
    int64_t kv_head;
    size_t first, last;
  };
  std::vector<Range> ranges;  // index ranges of tiles_, which moves while it grows
  for (const Band& band : bands_)
    for (int64_t kv_head = 0; kv_head < heads.kv_heads; ++kv_head) {
      size_t first = tiles_.size();
      cut_tiles(heads, kv_head, band);
      for (; first < tiles_.size(); first += tiles_per_batch)
        ranges.push_back({kv_head, first, std::min(first + tiles_per_batch, tiles_.size())});
    }
  for (const Range& r : ranges)
    batches_.push_back({r.kv_head, std::span(tiles_).subspan(r.first, r.last - r.first)});
}

void TileSweep::cut_tiles(const BlockHeads& heads, int64_t kv_head, const Band& band) {
  const int64_t head_begin = heads.head_begin(kv_head), head_end = heads.head_end(kv_head);
  if (head_begin >= head_end) return;
  const int64_t heads_at_once = std::min(head_end - head_begin, lane_stride);
  const int64_t rows_at_once = lane_stride / heads_at_once;
  const std::span<const Rectangle* const> members(members_);
  for (int64_t row = band.begin; row < band.end; row += rows_at_once)
    for (int64_t head = head_begin; head < head_end; head += heads_at_once)
      tiles_.push_back({row, std::min(rows_at_once, band.end - row), head,
                        std::min(heads_at_once, head_end - head),
                        members.subspan(band.first, band.last - band.first)});
}

void TileSweep::list_key_ranges(const TileBatch& batch, size_t only_key_block,
                                std::vector<KeyRange>& key_ranges) const {
  key_ranges.clear();
  for (size_t t = 0; t < batch.tiles.size(); ++t)
    for (const Rectangle* r : batch.tiles[t].rectangles) {
      const KeyLimits keys = key_limits(batch.tiles[t], *r);
      if (keys.begin >= keys.end) continue;
      const int64_t corner = r->k_begin;
      const int64_t begin = fixed_tiles_ ? keys.begin / key_tile * key_tile : keys.begin;
      auto key_block = std::upper_bound(
          key_blocks_.begin(), key_blocks_.end(), corner + begin,
          [](int64_t key, const KeyBlock& candidate) { return key < candidate.end; });
      for (; key_block != key_blocks_.end() && key_block->begin < corner + keys.end; ++key_block) {
        const size_t index = key_block - key_blocks_.begin();
        if (only_key_block == all_key_blocks || only_key_block == index)
          key_ranges.push_back({index, t, r, std::max(begin, key_block->begin - corner),
                                std::min(keys.end, key_block->end - corner)});
      }
    }
  const auto by_key_block = [](const KeyRange& a, const KeyRange& b) {
    return a.key_block < b.key_block;
  };
  if (!std::is_sorted(key_ranges.begin(), key_ranges.end(), by_key_block))
    std::stable_sort(key_ranges.begin(), key_ranges.end(), by_key_block);
}

int64_t TileSweep::padded_lanes(const Tile& tile) const {
  return fixed_tiles_ ? lane_stride : round_up(tile.lanes(), lane_granularity);
}

void TileSweep::add_masked(const Tile& tile, int64_t begin, int64_t end, ScoreBlocks& list) const {
  for (int64_t j = begin; j < end; j += diagonal_block) {
    const int64_t count = std::min(diagonal_block, end - j);
    const auto [first, last] = rows_that_see(tile, list, j, j + count);
    if (first < last)
      list.score_blocks.push_back({j, count,
                                   first * tile.heads / lane_granularity * lane_granularity,
                                   round_up(last * tile.heads, lane_granularity), true});
  }
}

void TileSweep::cut(const Tile& tile, const KeyRange& key_range, ScoreBlocks& list) const {
  const KeyLimits keys = key_limits(tile, *key_range.rectangle);
  const bool open = keys.open_begin <= key_range.begin && keys.open_end >= key_range.end;
  const int64_t lanes = padded_lanes(tile);
  list.score_blocks.clear();
  if (!open || fixed_tiles_) set_row_limits(tile, *key_range.rectangle, list);
  if (fixed_tiles_) {
    for (int64_t j = key_range.begin; j < key_range.end; j += key_tile)
      list.score_blocks.push_back(
          {j, key_tile, 0, lanes, keys.open_begin > j || keys.open_end < j + key_tile});
    return;
  }
  // On the left, whole blocks of 16 keys are masked, so that later blocks stay aligned.
  const int64_t left = std::max<int64_t>(0, keys.open_begin - key_range.begin);
  int64_t open_begin = key_range.begin + round_up(left, diagonal_block);
  int64_t open_end = key_range.end;
  if (keys.open_end < key_range.end)
    open_end = open_begin + (keys.open_end - open_begin) / diagonal_block * diagonal_block;
  if (open_begin >= open_end) open_begin = open_end = key_range.end;
  add_masked(tile, key_range.begin, open_begin, list);
  for (int64_t j = open_begin; j < open_end; j += key_tile)
    list.score_blocks.push_back({j, std::min(key_tile, open_end - j), 0, lanes, false});
  add_masked(tile, open_end, key_range.end, list);
}

void hide(const Tile& tile, const ScoreBlocks& list, const ScoreBlock& score_block, float value,
          float* block) {
  for (int64_t i = 0; i < score_block.count; ++i) {
    const int64_t key = score_block.begin + i;
    auto [first, last] = rows_that_see(tile, list, key, key + 1);
    first = std::clamp(first * tile.heads, score_block.lane_begin, score_block.lane_end);
    last = std::clamp(last * tile.heads, first, score_block.lane_end);
    float* lane = block + i * lane_stride;
    std::fill(lane + score_block.lane_begin, lane + first, value);
    std::fill(lane + last, lane + score_block.lane_end, value);
  }
}

}  // namespace gyre
