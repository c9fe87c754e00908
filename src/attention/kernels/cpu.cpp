// Flash attention on the CPU cores of one rank.
//
//     for every batch of tiles of one KV head, shared among threads
//         (tile: up to 64 lanes, which are query rows x the query heads of that KV head):
//       for every key block of up to 256 keys that they see, for every tile:
//         (at its first key block: pack its queries, transposed: Q [d][lane])
//         for every score block (visible keys) of the key block:
//           scores [key][lane]   = K [key][d] · Q [d][lane]           libxsmm
//           scores               = exp(scores - top), online          lane_ops, vertical reductions
//           out    [d][lane]    += Vᵀ [d][key] · scores [key][lane]   libxsmm
//         (after its last key block: merge (out, top + log sum) into the result)
//
// Backward uses the same loops with five products per block:
//
//         p      [key][lane]     = exp(K · Q - lse)
//         ds     [key][lane]     = p (V · dO - delta)
//         dv     [key][d]       += p · dO [lane][d]
//         dk     [key][d]       += ds · Q [lane][d]
//         dq     [d][lane]      += Kᵀ · ds
//
// Vectors run along lanes, so that no array whose size grows with the number of pairs is transposed
// or reduced within a vector. Blocks outside the mask are skipped. On diagonals a block has 16 keys
// and omits, in steps of 16, lanes that see none of them.
//
// f32 keys and values are read in place, unless rows are a multiple of 4 KiB apart and share the
// same cache sets (8 KV heads of 64: copies are 20 % faster on Zen 3); elsewhere copies were not
// faster. Key blocks of bf16 keys are converted once per batch. Fixed tiles are copied and padded
// with zeros.
//
// one_pass.cpp computes short documents.
//
// The scores and weights of hidden keys are overwritten, so that their weights are exactly 0. The
// products still read hidden keys: a NaN or infinity in one reaches the whole tile, which belongs
// to one document.

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/kernels/one_pass.hpp"
#include "attention/kernels/tile_worker.hpp"
#include "attention/kernels/tiles.hpp"
#include "core/error.hpp"
#include "core/special_values.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

constexpr int64_t forward_batch = largest_batch, backward_batch = largest_batch / 2;  // in tiles

using Rectangles = std::span<const Rectangle>;

struct Worker {
  TileWorker tiles;
  OnePassWorker one_pass;
};

class CpuKernel final : public BlockKernel {
 public:
  explicit CpuKernel(int threads) : threads_(threads), workers_(threads) {}

  bool can_overwrite() const override { return true; }

  void forward(const ForwardBlock& block) override {
    start(block);
    if (block.overwrite) forget(block);
    const OnePassSplit split = split_one_pass(block);
    for_each_share(split.one_pass, threads_, [&](Rectangles some, int thread) {
      worker(thread).one_pass.forward(block, some, 0, block.heads.kv_heads);
    });
    for_each_sweep(block, split.others, forward_batch, [&](const TileSweep& sweep) {
      for_each_task(threads_, std::ssize(sweep.batches()), [&](int64_t task, int thread) {
        worker(thread).tiles.forward(block, sweep, sweep.batches()[task]);
      });
    });
    if (block.overwrite) clear_unseen(block);
  }

  void backward(const BackwardBlock& block) override {
    start(block);
    if (block.overwrite_d_q) clear(block.d_q);
    if (block.overwrite_d_kv)
      for (const MatrixRef gradient : {MatrixRef(block.d_k), MatrixRef(block.d_v)}) clear(gradient);
    const OnePassSplit split = split_one_pass(block);
    one_pass(block, split);
    const Gradients wanted{!block.d_q.empty(), block.d_k.data != nullptr};
    for_each_sweep(block, split.others, backward_batch, [&](const TileSweep& sweep) {
      // One sweep computes five products for each pair. Separate sweeps for queries and for keys
      // compute seven, but can use more threads. The results are the same.
      const int64_t kv_heads = block.heads.kv_heads;
      if (threads_ == 1 || kv_heads % threads_ == 0) {
        for_each_task(threads_, threads_ == 1 ? 1 : kv_heads, [&](int64_t task, int thread) {
          for (const TileBatch& batch : sweep.batches())
            if (threads_ == 1 || batch.kv_head == task)
              worker(thread).tiles.backward(block, sweep, batch, wanted);
        });
        return;
      }
      if (wanted.queries) query_sweep(block, sweep);
      if (wanted.keys) key_sweep(block, sweep);
    });
  }

 private:
  void start(const BlockInput& in);
  static void clear(const MatrixRef& m);
  /// Sets all log-sum-exps to -inf, so that rows of `out` are overwritten without being read.
  static void forget(const ForwardBlock& block);
  /// Sets to 0 the rows of `out` whose log-sum-exp no rectangle has changed from -inf.
  static void clear_unseen(const ForwardBlock& block);

  Worker& worker(int thread) { return workers_[thread]; }

  /// Calls body(share, thread) for consecutive shares of all rectangles, several per thread.
  template <class Body>
  static void for_each_share(Rectangles all, int threads, Body body) {
    if (all.empty()) return;
    const int64_t parts = threads == 1 ? 1 : std::min(std::ssize(all), int64_t{8} * threads);
    for_each_task(threads, parts, [&](int64_t part, int thread) {
      const size_t begin = part * std::ssize(all) / parts;
      const size_t end = (part + 1) * std::ssize(all) / parts;
      body(all.subspan(begin, end - begin), thread);
    });
  }

  /// Rectangles with common keys add to the same rows of dK and dV: threads take whole KV heads.
  void one_pass(const BackwardBlock& block, const OnePassSplit& split) {
    const int64_t kv_heads = block.heads.kv_heads;
    if (threads_ == 1 || split.keys_apart)
      for_each_share(split.one_pass, threads_, [&](Rectangles some, int thread) {
        worker(thread).one_pass.backward(block, some, 0, kv_heads);
      });
    else
      for_each_task(threads_, kv_heads, [&](int64_t kv_head, int thread) {
        worker(thread).one_pass.backward(block, split.one_pass, kv_head, kv_head + 1);
      });
  }

  template <class Body>
  static void for_each_sweep(const BlockInput& in, Rectangles rectangles, int64_t tiles_per_batch,
                             Body body) {
    const size_t step = in.fixed_tiles ? 1 : rectangles.size();
    for (size_t first = 0; first < rectangles.size(); first += step)
      body(TileSweep(in.heads, rectangles.subspan(first, step), in.fixed_tiles, tiles_per_batch));
  }

  void query_sweep(const BackwardBlock& block, const TileSweep& sweep) {
    for_each_task(threads_, std::ssize(sweep.batches()), [&](int64_t task, int thread) {
      worker(thread).tiles.backward(block, sweep, sweep.batches()[task], {true, false});
    });
  }
  void key_sweep(const BackwardBlock& block, const TileSweep& sweep) {
    const auto key_blocks = std::ssize(sweep.key_blocks());
    for_each_task(threads_, key_blocks * block.heads.kv_heads, [&](int64_t task, int thread) {
      for (const TileBatch& batch : sweep.batches())
        if (batch.kv_head == task / key_blocks)
          worker(thread).tiles.backward(block, sweep, batch, {false, true}, task % key_blocks);
    });
  }

  int threads_;
  std::vector<Worker> workers_;
};

void CpuKernel::clear(const MatrixRef& m) {
  const int64_t size = size_of(m.type);
  for (int64_t r = 0; r < m.rows; ++r) std::memset(m.data + r * m.stride * size, 0, m.cols * size);
}

void CpuKernel::forget(const ForwardBlock& block) {
  for (int64_t r = 0; r < block.lse.rows; ++r)
    std::fill_n(block.lse.row(r), block.lse.cols, -infinity_of<float>);
}

void CpuKernel::clear_unseen(const ForwardBlock& block) {
  const auto head_bytes = block.heads.value_dim() * size_of(block.out.type);
  const auto row_bytes = block.out.stride * size_of(block.out.type);
  for (int64_t r = 0; r < block.lse.rows; ++r)
    for (int64_t h = 0; h < block.lse.cols; ++h)
      if (block.lse(r, h) == -infinity_of<float>)
        std::memset(block.out.data + r * row_bytes + h * head_bytes, 0, head_bytes);
}

void CpuKernel::start(const BlockInput& in) {
  const BlockHeads& h = in.heads;
  GYRE_CHECK(h.heads > 0 && h.group > 0 && h.skew >= 0 && h.skew < h.group &&
                 (h.heads - 1 + h.skew) / h.group < h.kv_heads,
             "{} heads in groups of {} from {} on over {} KV heads", h.heads, h.group, h.skew,
             h.kv_heads);
  GYRE_CHECK(in.k.type == in.v.type, "keys are {}, values {}", name_of(in.k.type),
             name_of(in.v.type));
  GYRE_CHECK(
      std::is_sorted(in.rectangles.begin(), in.rectangles.end(),
                     [](const Rectangle& a, const Rectangle& b) { return a.q_begin < b.q_begin; }),
      "rectangles are not sorted by their first query");
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Progress progress(i == 0 ? &in.progress : nullptr);
    workers_[i].tiles.start(h.head_dim, h.value_dim(), progress);
    workers_[i].one_pass.start(h.head_dim, h.value_dim(), progress);
  }
}

}  // namespace

std::unique_ptr<BlockKernel> make_cpu_kernel(int threads) {
  GYRE_CHECK(threads > 0, "{} threads", threads);
  return std::make_unique<CpuKernel>(threads);
}

}  // namespace gyre
