#include "attention/kernels/cuda_ragged_kernel.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "attention/kernels/cuda_kernel.hpp"
#include "attention/kernels/cuda_merge.hpp"
#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre {
namespace {

constexpr int64_t most_entries = 1024;
constexpr int64_t most_plans = 256;
constexpr int64_t deterministic_workspace = int64_t{1} << 30;

/// What the library was given of a list of rectangles: built once, and kept.
struct ReadyBatch {
  RaggedBatch batch;
  RaggedLimits limits;
  Buffer<std::byte> pinned, device;           // all tables and pieces; the copy may be under way
  std::map<AttentionTensor, int64_t> tables;  // bytes from the begin of `device`
  DeviceRound all_q;                          // pieces of all query rounds; they share no scratch
  std::vector<DeviceRound> q_rounds, k_rounds;
};

/// Distances between rows, elements.
struct RowStrides {
  int64_t q = 0, k = 0, v = 0, d_out = 0;
  int64_t q_columns = 0, k_columns = 0, heads = 0;
  friend bool operator==(const RowStrides&, const RowStrides&) = default;
};

struct ReadyPlan {
  std::vector<Rectangle> rectangles;
  RowStrides strides;
  bool fixed_tiles = false;
  std::vector<ReadyBatch> batches;
  std::vector<Rectangle> others;
  std::array<int64_t, not_ragged_reasons> reasons{};
};

/// Lays tables one behind the other, 16-byte aligned.
class TableWriter {
 public:
  template <class T>
  int64_t add(std::span<const T> values) {
    const auto begin = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(begin + values.size_bytes());
    std::memcpy(bytes_.data() + begin, values.data(), values.size_bytes());
    return static_cast<int64_t>(begin);
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

struct PieceTable {
  int64_t begin = 0;
  std::vector<std::pair<int64_t, int64_t>> rounds;  // pieces, longest
};

PieceTable add_pieces(TableWriter& writer, const std::vector<Round>& rounds) {
  PieceTable table;
  std::vector<RowPiece> pieces;
  for (const Round& round : rounds) {
    int64_t longest = 0;
    for (const RowPiece& p : round) longest = std::max(longest, p.length);
    pieces.insert(pieces.end(), round.begin(), round.end());
    table.rounds.emplace_back(std::ssize(round), longest);
  }
  table.begin = writer.add<RowPiece>(pieces);
  return table;
}

std::vector<DeviceRound> device_rounds(const PieceTable& table, const std::byte* device) {
  std::vector<DeviceRound> rounds;
  const auto* pieces = reinterpret_cast<const RowPiece*>(device + table.begin);
  for (const auto& [count, longest] : table.rounds) {
    rounds.push_back({pieces, count, longest});
    pieces += count;
  }
  return rounds;
}

ReadyBatch make_ready(RaggedBatch batch, const RowStrides& strides, Stream& stream) {
  ReadyBatch ready;
  ready.limits = limits_of(batch);
  const int64_t capacity = ready.limits.capacity;
  TableWriter writer;
  const auto lengths = [&](AttentionTensor id, RaggedRows rows) {
    ready.tables[id] = writer.add<int32_t>(ragged_lengths(batch, rows, capacity));
  };
  const auto offsets = [&](AttentionTensor id, RaggedRows rows, int64_t stride) {
    ready.tables[id] = writer.add<int64_t>(ragged_offsets(batch, rows, stride, capacity));
  };
  lengths(AttentionTensor::q_lengths, RaggedRows::q);
  lengths(AttentionTensor::k_lengths, RaggedRows::k);
  offsets(AttentionTensor::q_offsets, RaggedRows::q, strides.q);
  offsets(AttentionTensor::k_offsets, RaggedRows::k, strides.k);
  offsets(AttentionTensor::v_offsets, RaggedRows::k, strides.v);
  offsets(AttentionTensor::d_out_offsets, RaggedRows::q, strides.d_out);
  offsets(AttentionTensor::out_offsets, RaggedRows::scratch_q, strides.q_columns);
  offsets(AttentionTensor::d_q_offsets, RaggedRows::scratch_q, strides.q_columns);
  offsets(AttentionTensor::lse_offsets, RaggedRows::scratch_q, strides.heads);
  offsets(AttentionTensor::d_k_offsets, RaggedRows::scratch_k, strides.k_columns);
  const PieceTable q = add_pieces(writer, query_rounds(batch));
  const PieceTable k = add_pieces(writer, key_rounds(batch));

  const std::vector<std::byte>& bytes = writer.bytes();
  ready.pinned = Buffer<std::byte>(std::ssize(bytes), MemorySpace::pinned);
  ready.device = Buffer<std::byte>(std::ssize(bytes), MemorySpace::device);
  std::memcpy(ready.pinned.data(), bytes.data(), bytes.size());
  stream.copy(ready.device.data(), ready.pinned.data(), bytes.size());
  ready.q_rounds = device_rounds(q, ready.device.data());
  ready.k_rounds = device_rounds(k, ready.device.data());
  ready.all_q = {reinterpret_cast<const RowPiece*>(ready.device.data() + q.begin),
                 std::ssize(batch.entries), batch.longest_q};
  ready.batch = std::move(batch);
  return ready;
}

/// Memory of the device that is kept and grows.
class Scratch {
 public:
  std::byte* at_least(int64_t bytes) {
    if (buffer_.size() < bytes) buffer_ = Buffer<std::byte>(bytes, MemorySpace::device);
    return buffer_.data();
  }
  MatrixRef matrix(DType type, int64_t rows, int64_t columns) {
    const int64_t bytes = rows * columns * static_cast<int64_t>(size_of(type));
    return {at_least(bytes), type, rows, columns, columns};
  }

 private:
  Buffer<std::byte> buffer_;
};

bool aligned(ConstMatrixRef m) {
  return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride % 8 == 0;
}

/// Why the library takes no part of a call; nullptr when it may.
const char* unfit(const BlockInput& block, ConstMatrixRef d_out) {
  const BlockHeads& h = block.heads;
  if (block.q.type != DType::bf16) return "f32 arrays";
  if (h.head_dim % 16 != 0) return "head_dim not a multiple of 16";
  // A library's query head i reads KV head i / (heads / kv_heads).
  const bool whole_groups = h.skew == 0 && h.heads == h.kv_heads * h.group;
  if (!whole_groups && h.kv_heads != 1) return "parts of head groups";
  if (!aligned(block.q) || !aligned(block.k) || !aligned(block.v) ||
      (!d_out.empty() && !aligned(d_out)))
    return "rows that are not 16-byte aligned";
  return nullptr;
}

class RaggedKernel final : public BlockKernel {
 public:
  RaggedKernel(Stream& stream, std::unique_ptr<AttentionLibrary> library)
      : stream_(stream), library_(std::move(library)), tiled_(make_cuda_kernel(stream)) {}

  void forward(const ForwardBlock& block) override {
    const std::vector<Rectangle> rest =
        each_batch(block, {}, [&](const ReadyBatch& ready) { return forward_batch(block, ready); });
    if (rest.empty()) return;
    ForwardBlock tiled = block;
    tiled.rectangles = rest;
    tiled_->forward(tiled);
  }

  void backward(const BackwardBlock& block) override {
    const std::vector<Rectangle> rest = each_batch(
        block, block.d_out, [&](const ReadyBatch& ready) { return backward_batch(block, ready); });
    if (rest.empty()) return;
    BackwardBlock tiled = block;
    tiled.rectangles = rest;
    tiled_->backward(tiled);
  }

  KernelPrecision precision(DType activations) const override {
    const bool narrow = activations == DType::bf16;
    return {narrow, narrow};
  }

  std::string note() const override {
    std::string text;
    const auto add = [&](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
    int64_t rest = 0;
    std::string reasons;
    for (const auto& [reason, count] : tiled_rectangles_) {
      rest += count;
      reasons += (reasons.empty() ? "" : ", ") + reason;
    }
    if (rest > 0)
      add(fmt::format("tiled kernel for {} of {} rectangles ({})", rest, rectangles_, reasons));
    if (unordered_) add(library_->name() + "'s dQ is summed in no fixed order");
    return text;
  }

 private:
  struct BuiltGraph {
    std::unique_ptr<AttentionGraph> graph;  // none: refused
    std::string problem;
  };

  /// Calls run(batch) for what the library may take; it returns whether that did. Returns the rest.
  template <class Run>
  std::vector<Rectangle> each_batch(const BlockInput& block, ConstMatrixRef d_out, Run run) {
    rectangles_ += std::ssize(block.rectangles);
    if (const char* reason = unfit(block, d_out)) {
      tiled_rectangles_[reason] += std::ssize(block.rectangles);
      return {block.rectangles.begin(), block.rectangles.end()};
    }
    const ReadyPlan& plan = ready_plan(block, d_out);
    std::vector<Rectangle> rest = plan.others;
    for (int i = 0; i < not_ragged_reasons; ++i)
      if (const int64_t count = plan.reasons[static_cast<size_t>(i)]; count > 0)
        tiled_rectangles_[name_of(static_cast<NotRagged>(i))] += count;
    for (const ReadyBatch& ready : plan.batches) {
      if (!run(ready)) {
        const std::vector<Rectangle> refused = rectangles_of(ready.batch);
        rest.insert(rest.end(), refused.begin(), refused.end());
      }
      if (block.progress) block.progress();
    }
    std::stable_sort(rest.begin(), rest.end(),
                     [](const Rectangle& a, const Rectangle& b) { return a.q_begin < b.q_begin; });
    return rest;
  }

  const ReadyPlan& ready_plan(const BlockInput& block, ConstMatrixRef d_out) {
    const BlockHeads& h = block.heads;
    const RowStrides strides = {block.q.stride, block.k.stride,       block.v.stride,
                                d_out.stride,   h.heads * h.head_dim, h.kv_heads * h.head_dim,
                                h.heads};
    for (const auto& plan : plans_)
      if (plan->strides == strides && plan->fixed_tiles == block.fixed_tiles &&
          std::equal(plan->rectangles.begin(), plan->rectangles.end(), block.rectangles.begin(),
                     block.rectangles.end()))
        return *plan;
    if (std::ssize(plans_) == most_plans) {
      stream_.synchronize();  // copies of tables may be under way
      plans_.clear();
    }
    RaggedPlan ragged = plan_ragged(block.rectangles, block.fixed_tiles, most_entries,
                                    2 * std::max(block.q.rows, block.k.rows));
    auto plan = std::make_unique<ReadyPlan>();
    plan->rectangles.assign(block.rectangles.begin(), block.rectangles.end());
    plan->strides = strides;
    plan->fixed_tiles = block.fixed_tiles;
    plan->others = std::move(ragged.others);
    plan->reasons = ragged.reasons;
    for (RaggedBatch& batch : ragged.batches)
      plan->batches.push_back(make_ready(std::move(batch), strides, stream_));
    return *plans_.emplace_back(std::move(plan));
  }

  static AttentionGraphShape shape_of(const BlockInput& block, const ReadyBatch& ready) {
    const BlockHeads& h = block.heads;
    AttentionGraphShape shape;
    shape.mask = ready.batch.mask;
    shape.heads = h.heads;
    shape.kv_heads = h.kv_heads;
    shape.head_dim = h.head_dim;
    shape.scale = h.scale;
    shape.batch = ready.limits.capacity;
    shape.longest_q = ready.limits.longest_q;
    shape.longest_k = ready.limits.longest_k;
    shape.q_stride = block.q.stride;
    shape.k_stride = block.k.stride;
    shape.v_stride = block.v.stride;
    shape.out_stride = h.heads * h.head_dim;
    shape.lse_stride = h.heads;
    return shape;
  }

  BuiltGraph build(const AttentionGraphShape& shape) {
    BuiltGraph built;
    built.graph = library_->build(shape, built.problem);
    return built;
  }

  /// The graph of a shape, deterministic if it can be; without one, the rectangles of `ready` are
  /// counted as refused.
  AttentionGraph* graph_of(AttentionGraphShape shape, const ReadyBatch& ready) {
    auto found = graphs_.find(shape);
    if (found == graphs_.end()) {
      BuiltGraph built;
      if (shape.backward) {
        AttentionGraphShape ordered = shape;
        ordered.deterministic = true;
        built = build(ordered);
      }
      if (!built.graph || built.graph->workspace_bytes() > deterministic_workspace) {
        built = build(shape);
        unordered_ = unordered_ || (shape.backward && built.graph);
      }
      found = graphs_.emplace(shape, std::move(built)).first;
    }
    if (found->second.graph) return found->second.graph.get();
    tiled_rectangles_["refused by " + library_->name() + ": " +
                      found->second.problem.substr(0, 80)] += std::ssize(ready.batch.entries);
    return nullptr;
  }

  static void* address(ConstMatrixRef m) { return const_cast<std::byte*>(m.data); }

  void execute(AttentionGraph& graph, const BlockInput& block, const ReadyBatch& ready,
               std::initializer_list<std::pair<AttentionTensor, ConstMatrixRef>> arrays,
               std::initializer_list<AttentionTensor> tables) {
    using enum AttentionTensor;
    AttentionAddresses addresses = {
        {q, address(block.q)}, {k, address(block.k)}, {v, address(block.v)}};
    for (const auto& [id, matrix] : arrays) addresses[id] = address(matrix);
    for (const AttentionTensor id : {q_lengths, k_lengths, q_offsets, k_offsets, v_offsets})
      addresses[id] = table(ready, id);
    for (const AttentionTensor id : tables) addresses[id] = table(ready, id);
    graph.execute(addresses, workspace_.at_least(graph.workspace_bytes()));
  }
  static void* table(const ReadyBatch& ready, AttentionTensor id) {
    return const_cast<std::byte*>(ready.device.data()) + ready.tables.at(id);
  }

  bool forward_batch(const ForwardBlock& block, const ReadyBatch& ready) {
    const BlockHeads& h = block.heads;
    const int64_t rows = ready.batch.q_rows;
    AttentionGraph* graph = graph_of(shape_of(block, ready), ready);
    if (graph == nullptr) return false;
    const MatrixRef out = out_.matrix(DType::bf16, rows, h.heads * h.head_dim);
    const MatrixRef lse = lse_.matrix(DType::f32, rows, h.heads);
    execute(*graph, block, ready, {{AttentionTensor::out, out}, {AttentionTensor::lse, lse}},
            {AttentionTensor::out_offsets, AttentionTensor::lse_offsets});
    for (const DeviceRound& round : ready.q_rounds)
      cuda_merge_rows(round, out, lse.as<float>(), block.out, block.lse, stream_);
    return true;
  }

  bool backward_batch(const BackwardBlock& block, const ReadyBatch& ready) {
    const BlockHeads& h = block.heads;
    const RaggedBatch& batch = ready.batch;
    AttentionGraphShape shape = shape_of(block, ready);
    shape.backward = true;
    shape.d_out_stride = block.d_out.stride;
    shape.d_q_stride = h.heads * h.head_dim;
    shape.q_rows = rounded_up(batch.q_rows, 128);
    shape.k_rows = rounded_up(batch.k_rows, 128);
    AttentionGraph* graph = graph_of(shape, ready);
    if (graph == nullptr) return false;
    const int64_t q_columns = h.heads * h.head_dim, k_columns = h.kv_heads * h.head_dim;
    const MatrixRef stand_in = out_.matrix(DType::bf16, batch.q_rows, q_columns);
    const MatrixRef lse = lse_.matrix(DType::f32, batch.q_rows, h.heads);
    const MatrixRef d_q = d_q_.matrix(DType::bf16, batch.q_rows, q_columns);
    const MatrixRef d_k = d_k_.matrix(DType::bf16, batch.k_rows, k_columns);
    const MatrixRef d_v = d_v_.matrix(DType::bf16, batch.k_rows, k_columns);
    cuda_stand_in_rows(ready.all_q, block.d_out, block.lse, block.delta, stand_in, lse.as<float>(),
                       stream_);
    using Id = AttentionTensor;
    execute(
        *graph, block, ready,
        {{AttentionTensor::out, stand_in},
         {AttentionTensor::lse, lse},
         {AttentionTensor::d_out, block.d_out},
         {AttentionTensor::d_q, d_q},
         {AttentionTensor::d_k, d_k},
         {AttentionTensor::d_v, d_v}},
        {Id::out_offsets, Id::lse_offsets, Id::d_out_offsets, Id::d_q_offsets, Id::d_k_offsets});
    for (const DeviceRound& round : ready.q_rounds)
      if (!block.d_q.empty()) cuda_add_rows(round, d_q, block.d_q, stream_);
    for (const DeviceRound& round : ready.k_rounds)
      if (block.d_k.data != nullptr) {
        cuda_add_rows(round, d_k, block.d_k, stream_);
        cuda_add_rows(round, d_v, block.d_v, stream_);
      }
    return true;
  }

  Stream& stream_;
  std::unique_ptr<AttentionLibrary> library_;
  std::unique_ptr<BlockKernel> tiled_;
  std::map<AttentionGraphShape, BuiltGraph> graphs_;
  std::vector<std::unique_ptr<ReadyPlan>> plans_;
  Scratch out_, lse_, d_q_, d_k_, d_v_, workspace_;
  int64_t rectangles_ = 0;
  std::map<std::string, int64_t> tiled_rectangles_;  // by reason
  bool unordered_ = false;
};

}  // namespace

std::unique_ptr<BlockKernel> make_ragged_kernel(Stream& stream,
                                                std::unique_ptr<AttentionLibrary> library) {
  return std::make_unique<RaggedKernel>(stream, std::move(library));
}

}  // namespace gyre
