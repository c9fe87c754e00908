#pragma once
// Blocking of the CPU attention kernel, and the order of its work.
//
//     sweep        all rectangles of a call; with fixed tiles, one rectangle
//     key block    up to 256 rows of the key array; key blocks end where rectangles do, so that a
//                  short document lies in one key block
//     tile         up to 64 lanes: query rows under the same rectangles x the query heads of a KV
//                  head
//     batch        consecutive tiles of one KV head under the same rectangles, up to a limit
//     key range    the keys of one key block that the queries of one tile see in one rectangle
//     score block  a block of up to 64 keys and the lanes that see some of it
//
// Example: one causal document of 512 tokens, one head. Tiles: rows 0-63, 64-127, ... 448-511, all
// in one batch. Key blocks: keys 0-255 and 256-511. Key ranges, in order: key block 0 by tile 0
// (keys 0-63), tile 1 (0-127), ... tile 7 (0-255); key block 1 by tile 4 (256-319), ... tile 7
// (256-511). Score blocks of the last key range: 64 keys x 64 lanes three times, then on the
// diagonal 16 keys x 64 lanes, 16 x 48, 16 x 32, 16 x 16.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/kernels/lane_ops.hpp"
#include "attention/kernels/products.hpp"

namespace gyre {

constexpr int64_t largest_key_block = 4 * key_tile;
constexpr size_t all_key_blocks = SIZE_MAX;

struct KeyBlock {
  int64_t begin, end;  ///< rows of the key array
};

/// Lane i is row row_begin + i / heads, query head head_begin + i % heads.
struct Tile {
  int64_t row_begin, rows, head_begin, heads;
  std::span<const Rectangle* const> rectangles;  ///< the rectangles that cover the tile
  int64_t lanes() const { return rows * heads; }
};

/// Consecutive tiles of one KV head under the same rectangles.
struct TileBatch {
  int64_t kv_head = 0;
  std::span<const Tile> tiles;
};

/// Keys [begin, end) of the rectangle, counted from its corner.
struct KeyRange {
  size_t key_block, tile;  ///< indices in the sweep and in the batch
  const Rectangle* rectangle;
  int64_t begin, end;
};

/// Part of a key range: lanes [lane_begin, lane_end), multiples of 16, attend to its keys.
struct ScoreBlock {
  int64_t begin, count;  ///< keys, counted from the rectangle's corner
  int64_t lane_begin, lane_end;
  bool masked;  ///< some pairs are hidden: see hide()
  int64_t lanes() const { return lane_end - lane_begin; }
};

/// A key range cut into score blocks, in order of keys.
struct ScoreBlocks {
  std::vector<ScoreBlock> score_blocks;
  /// Row i of the tile sees keys [begin[i], end[i]), clipped to the rectangle; both are
  /// nondecreasing. Set if any score block is masked.
  std::array<int64_t, lane_stride> begin, end;
};

class TileSweep {
 public:
  /// `rectangles` are sorted by q_begin. They and the sweep must outlive its tiles.
  TileSweep(const BlockHeads& heads, std::span<const Rectangle> rectangles, bool fixed_tiles,
            int64_t tiles_per_batch);
  TileSweep(const TileSweep&) = delete;
  TileSweep& operator=(const TileSweep&) = delete;

  bool fixed_tiles() const { return fixed_tiles_; }
  /// In row order, so that all KV heads use the rows of a short document while they are cached;
  /// within one KV head, in tile order.
  const std::vector<TileBatch>& batches() const { return batches_; }
  const std::vector<KeyBlock>& key_blocks() const { return key_blocks_; }
  /// The tile after this one in the order of batches; null after the last.
  const Tile* next(const Tile& tile) const { return &tile == &tiles_.back() ? nullptr : &tile + 1; }
  /// Lists the key ranges of a batch, sorted by key block, then by tile: all of them
  /// (all_key_blocks), or those of one key block.
  void list_key_ranges(const TileBatch& batch, size_t only_key_block,
                       std::vector<KeyRange>& key_ranges) const;
  /// Lanes with padding: 64 for fixed tiles; otherwise as many as needed, a multiple of 16.
  int64_t padded_lanes(const Tile& tile) const;
  /// Cuts a key range into score blocks. On diagonals they have 16 keys and omit lanes that see
  /// none of these. Those of fixed tiles are 64 keys x 64 lanes, counted from the rectangle's
  /// corner; the last may extend past the key range.
  void cut(const Tile& tile, const KeyRange& key_range, ScoreBlocks& list) const;

 private:
  struct Band;
  void cut_bands(std::span<const Rectangle> rectangles);
  void cut_key_blocks(std::span<const Rectangle> rectangles);
  void cut_tiles(const BlockHeads& heads, int64_t tiles_per_batch);
  void cut_tiles(const BlockHeads& heads, int64_t kv_head, const Band& band);
  void add_masked(const Tile& tile, int64_t begin, int64_t end, ScoreBlocks& list) const;

  bool fixed_tiles_;
  std::vector<Band> bands_;
  std::vector<const Rectangle*> members_;  ///< rectangles of all bands
  std::vector<KeyBlock> key_blocks_;
  std::vector<Tile> tiles_;
  std::vector<TileBatch> batches_;
};

/// Query rows [begin, end) covered by the same rectangles, members_ [first, last).
struct TileSweep::Band {
  int64_t begin, end;
  size_t first, last;
};

/// Writes `value` to the hidden pairs of a score block in `block` [count][lane_stride], whose first
/// column is lane 0.
void hide(const Tile& tile, const ScoreBlocks& list, const ScoreBlock& score_block, float value,
          float* block);

}  // namespace gyre
