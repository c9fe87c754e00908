#include "attention/kernels/cuda_kernel.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <vector>

#include "attention/kernels/cuda_arguments.hpp"
#include "attention/kernels/cuda_tiles.hpp"
#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre {
namespace {

/// Offsets of the consecutive parts of a table in one byte array.
struct TableParts {
  size_t ranges, tiles, bytes;  ///< begins of two parts, and the end; rectangles begin at 0
  explicit TableParts(const TileTable& table)
      : ranges(table.rectangles.size() * sizeof(TileRectangle)),
        tiles(ranges + round_up(table.ranges.size() * sizeof(TileRange), alignof(OuterTile))),
        bytes(tiles + table.tiles.size() * sizeof(OuterTile)) {}
};

/// Cache of tables in device memory, by the rectangles they were made from.
class TileTables {
 public:
  explicit TileTables(Stream& stream) : stream_(stream) {}

  /// Tiles with `outer` rows, inner tiles of `inner` rows; later work of the stream may read them.
  DeviceTiles find(std::span<const Rectangle> rectangles, TileSide side, int outer, int inner) {
    const auto same = [&](const Entry& e) {
      return e.side == side && e.outer == outer && e.inner == inner &&
             std::equal(e.rectangles.begin(), e.rectangles.end(), rectangles.begin(),
                        rectangles.end());
    };
    const auto found = std::find_if(entries_.begin(), entries_.end(), same);
    if (found != entries_.end()) {
      entries_.splice(entries_.begin(), entries_, found);
    } else {
      if (entries_.size() >= most) {
        stream_.synchronize();  // a kernel may still read it
        entries_.pop_back();
      }
      entries_.push_front(upload(rectangles, side, outer, inner));
    }
    return entries_.front().tiles;
  }

 private:
  static constexpr size_t most = 256;  ///< a plan has a few per step

  struct Entry {
    std::vector<Rectangle> rectangles;
    TileSide side;
    int outer, inner;
    Buffer<std::byte> pinned, device;
    DeviceTiles tiles;
  };

  Entry upload(std::span<const Rectangle> rectangles, TileSide side, int outer, int inner) {
    const TileTable table = make_tile_table(rectangles, side, outer, inner);
    Entry e{{rectangles.begin(), rectangles.end()}, side, outer, inner, {}, {}, {}};
    if (table.tiles.empty()) return e;
    const TableParts parts(table);
    e.pinned = Buffer<std::byte>(parts.bytes, MemorySpace::pinned);
    e.device = Buffer<std::byte>(parts.bytes, MemorySpace::device);
    const auto put = [&](size_t at, const auto& part) {
      std::memcpy(e.pinned.data() + at, part.data(), part.size() * sizeof(part[0]));
      return e.device.data() + at;
    };
    e.tiles.rectangles = reinterpret_cast<TileRectangle*>(put(0, table.rectangles));
    e.tiles.ranges = reinterpret_cast<TileRange*>(put(parts.ranges, table.ranges));
    e.tiles.tiles = reinterpret_cast<OuterTile*>(put(parts.tiles, table.tiles));
    e.tiles.count = static_cast<int>(table.tiles.size());
    stream_.copy(e.device.data(), e.pinned.data(), parts.bytes);
    return e;
  }

  Stream& stream_;
  std::list<Entry> entries_;
};

DeviceInput input_of(const ConstMatrixRef& m, int64_t dim) {
  const int64_t size = size_of(m.type);
  return {m.data, m.rows, m.stride, static_cast<int>(dim),
          in_pieces_of_16(reinterpret_cast<uintptr_t>(m.data), m.stride * size, dim * size)};
}
DeviceOutput output_of(const MatrixRef& m) {
  return {m.data, m.rows, m.stride, m.type == DType::bf16};
}
DeviceStatistic statistic_of(MatrixView<const float> m) {
  return {const_cast<float*>(m.data), m.stride};
}
KernelHeads heads_of(const BlockHeads& h) {
  const auto narrow = [](int64_t x) { return static_cast<int>(x); };
  return {.heads = narrow(h.heads),
          .kv_heads = narrow(h.kv_heads),
          .group = narrow(h.group),
          .skew = narrow(h.skew),
          .head_dim = narrow(h.head_dim),
          .value_dim = narrow(h.value_dim()),
          .scale = h.scale};
}
int64_t widest_dim(const BlockHeads& h) {
  return std::max(h.head_dim, h.value_dim());
}

void check_type(const char* what, DType type, DType expected) {
  if (type != expected)
    throw_usage("{} of {}: the CUDA attention kernel takes q, k, v and d_out of one type, here {}",
                what, name_of(type), name_of(expected));
}
void check_output(const char* what, DType type) {
  if (type != DType::f32 && type != DType::bf16)
    throw_usage("{} of {}: the CUDA attention kernel takes f32 and bf16", what, name_of(type));
}

void check(const BlockInput& in) {
  const BlockHeads& h = in.heads;
  GYRE_CHECK(h.heads > 0 && h.group > 0 && h.skew >= 0 && h.skew < h.group &&
                 (h.heads - 1 + h.skew) / h.group < h.kv_heads,
             "{} heads in groups of {} from {} on over {} KV heads", h.heads, h.group, h.skew,
             h.kv_heads);
  for (const int64_t dim : {h.head_dim, h.value_dim()})
    if (dim < 1 || dim > cuda_kernel_largest_head_dim)
      throw_usage("heads of {} elements: the CUDA attention kernel takes 1 to {}", dim,
                  cuda_kernel_largest_head_dim);
  if (!(h.scale > 0))
    throw_usage("a scale of {}: the CUDA attention kernel takes positive ones", h.scale);
  check_output("q", in.q.type);
  check_type("k", in.k.type, in.q.type);
  check_type("v", in.v.type, in.q.type);
}

class CudaKernel final : public BlockKernel {
 public:
  CudaKernel(Stream& stream, int64_t sm_bytes)
      : stream_(stream),
        handle_(cuda_handle(stream)),
        sm_bytes_(sm_bytes > 0 ? sm_bytes : shared_memory_of_sm()),
        tables_(stream) {}

  void forward(const ForwardBlock& block) override {
    GYRE_CHECK(!block.overwrite, "overwrite is set, but this kernel merges into out");
    check(block);
    check_output("out", block.out.type);
    const int64_t dim = block.heads.head_dim, value_dim = block.heads.value_dim();
    ForwardArguments a;
    a.tiles = tiles(block, Sweep::forward);
    a.heads = heads_of(block.heads);
    a.store_each_range = block.fixed_tiles;
    a.q = input_of(block.q, dim), a.k = input_of(block.k, dim), a.v = input_of(block.v, value_dim);
    a.out = output_of(block.out);
    a.lse = statistic_of(block.lse);
    start_forward(a, block.q.type, tile_form(block, Sweep::forward), handle_);
    if (block.progress) block.progress();
  }

  void backward(const BackwardBlock& block) override {
    GYRE_CHECK(!block.overwrite_d_q && !block.overwrite_d_kv,
               "overwrite is set, but this kernel adds to the gradients");
    check(block);
    check_type("d_out", block.d_out.type, block.q.type);
    const int64_t dim = block.heads.head_dim, value_dim = block.heads.value_dim();
    BackwardArguments a;
    a.heads = heads_of(block.heads);
    a.store_each_range = block.fixed_tiles;
    a.q = input_of(block.q, dim), a.k = input_of(block.k, dim), a.v = input_of(block.v, value_dim);
    a.d_out = input_of(block.d_out, value_dim);
    a.lse = statistic_of(block.lse), a.delta = statistic_of(block.delta);
    if (!block.d_q.empty()) {
      check_output("d_q", block.d_q.type);
      a.d_q = output_of(block.d_q);
      a.tiles = tiles(block, Sweep::query_gradients);
      start_query_gradients(a, block.q.type, tile_form(block, Sweep::query_gradients), handle_);
    }
    if (block.d_k.data != nullptr) {
      a.d_k = output_of(block.d_k), a.d_v = output_of(block.d_v);
      a.tiles = tiles(block, Sweep::key_gradients);
      start_key_gradients(a, block.q.type, tile_form(block, Sweep::key_gradients), handle_);
    }
    if (block.progress) block.progress();
  }

  KernelPrecision precision(DType activations) const override {
    return {activations == DType::bf16, false};
  }

 private:
  static int64_t shared_memory_of_sm() {
    int device = 0, bytes = 0;
    GYRE_CHECK_CUDA(cudaGetDevice(&device));
    GYRE_CHECK_CUDA(
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    return bytes;
  }
  TileForm tile_form(const BlockInput& in, Sweep sweep) const {
    return tile_form_for(in.q.type, sweep, tile_dim_for(widest_dim(in.heads)), sm_bytes_);
  }
  DeviceTiles tiles(const BlockInput& in, Sweep sweep) {
    const TileShape shape =
        tile_shape(in.q.type, sweep, tile_dim_for(widest_dim(in.heads)), tile_form(in, sweep));
    const auto side = sweep == Sweep::key_gradients ? TileSide::keys : TileSide::queries;
    return tables_.find(in.rectangles, side, shape.outer(), shape.inner);
  }

  Stream& stream_;
  CUstream_st* handle_;
  int64_t sm_bytes_;
  TileTables tables_;
};

}  // namespace

std::unique_ptr<BlockKernel> make_cuda_kernel(Stream& stream, int64_t sm_bytes) {
  return std::make_unique<CudaKernel>(stream, sm_bytes);
}

}  // namespace gyre
