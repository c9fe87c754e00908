#pragma once
// Arithmetic of the CPU attention kernel on tiles; cpu.cpp describes the loops.

#include <array>
#include <list>
#include <span>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/kernels/products.hpp"
#include "attention/kernels/progress.hpp"
#include "attention/kernels/tiles.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

constexpr size_t largest_batch = 16;  ///< largest number of tiles in a batch

/// Keys and values of a key block for one KV head, and the destinations of their gradients.
struct KeyPanels {
  int64_t begin = 0, end = 0;  ///< rows of the key array
  const float *k = nullptr, *v = nullptr;
  float *d_k = nullptr, *d_v = nullptr;
  Products *k_products = nullptr, *v_products = nullptr;
  Products *d_k_products = nullptr, *d_v_products = nullptr;
  int64_t k_stride = 0, v_stride = 0, d_k_stride = 0, d_v_stride = 0;
  bool gradients_apart = false;  ///< d_k and d_v are panels, added to the results at the end
};

struct Gradients {
  bool queries, keys;
};

/// One thread of the CPU attention kernel: its scratch arrays, and the loops over one batch of
/// tiles.
class TileWorker {
 public:
  void start(int64_t head_dim, int64_t value_dim, Progress progress);
  void forward(const ForwardBlock& block, const TileSweep& sweep, const TileBatch& batch);
  void backward(const BackwardBlock& block, const TileSweep& sweep, const TileBatch& batch,
                Gradients wanted, size_t only_key_block = all_key_blocks);

 private:
  float* tile_array(Buffer<float>& buffer, size_t slot) {
    return buffer.data() + slot * widest_dim_ * lane_stride;
  }
  static float* lane_array(Buffer<float>& buffer, size_t slot) {
    return buffer.data() + slot * lane_stride;
  }
  void reserve(Buffer<float>& buffer, int64_t count) {
    if (buffer.size() < count) buffer = Buffer<float>(count);
  }
  Products& products(int64_t dim, int64_t stride);
  KeyPanels open_key_block(const BlockInput& in, const TileSweep& sweep, int64_t kv_head,
                           std::span<const KeyRange> key_ranges);
  void open_gradients(const BackwardBlock& block, const TileSweep& sweep, int64_t kv_head,
                      KeyPanels& keys);
  void add_gradients(const BackwardBlock& block, int64_t kv_head, const KeyPanels& keys);
  template <class Open, class Begin, class EachBlock, class End, class Close>
  void walk(const TileSweep& sweep, const TileBatch& batch, Open open, Begin begin,
            EachBlock each_block, End end, Close close);

  void begin_forward(const ForwardBlock& block, const Tile& tile, int64_t padded, size_t slot);
  void attend(const Tile& tile, const ScoreBlock& score_block, int64_t key, const KeyPanels& keys,
              size_t slot);
  void end_forward(const ForwardBlock& block, const Tile& tile, size_t slot);
  void begin_backward(const BackwardBlock& block, const Tile& tile, int64_t padded, size_t slot);
  void differentiate(const Tile& tile, const ScoreBlock& score_block, int64_t key,
                     const KeyPanels& keys, size_t slot, Gradients wanted);
  void end_backward(const BackwardBlock& block, const Tile& tile, size_t slot);
  /// Prefetches the rows of a tile in an array of query heads of `dim` elements.
  static void prefetch_tile(ConstMatrixRef from, const Tile& tile, int64_t dim);

  int64_t head_dim_ = 0, value_dim_ = 0, widest_dim_ = 0;
  std::list<Products> products_;
  Progress progress_;
  std::vector<KeyRange> key_ranges_;
  ScoreBlocks score_blocks_;
  // Per slot (a tile): [dim][lane_stride]; rows_ and d_out_rows_ [lane][dim]; top_ and sum_ [lane].
  // dim is head_dim or value_dim; a slot has room for the larger one. In the backward pass, out_ is
  // dQ, top_ the log-sum-exp and sum_ delta.
  Buffer<float> packed_, out_, packed_d_out_, rows_, d_out_rows_, top_, sum_;
  Buffer<float> scores_, d_scores_;                          // [key_tile][lane_stride]
  Buffer<float> k_panel_, v_panel_, d_k_panel_, d_v_panel_;  // [largest_key_block][dim]
  Buffer<float> row_scratch_;                                // [lane_stride][dim]
};

}  // namespace gyre
