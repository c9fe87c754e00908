#include "attention/kernels/cuda_ragged_kernel.hpp"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "attention/kernels/attention_graphs.hpp"
#include "attention/kernels/cuda_finite_rows.hpp"
#include "attention/kernels/cuda_kernel.hpp"
#include "attention/kernels/cuda_ragged_shapes.hpp"
#include "attention/kernels/cuda_ragged_tables.hpp"
#include "attention/kernels/cuda_reversed_rows.hpp"
#include "attention/kernels/cuda_scratch.hpp"
#include "core/error.hpp"
#include "core/special_values.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre {
namespace {

constexpr int64_t max_plans = 256;

class RaggedKernel final : public BlockKernel {
 public:
  RaggedKernel(Stream& stream, std::unique_ptr<AttentionLibrary> library, bool deterministic)
      : stream_(stream),
        library_(std::move(library)),
        tiled_(make_cuda_kernel(stream)),
        finite_(stream),
        reversed_(stream),
        graphs_(*library_, deterministic) {}

  void forward(const ForwardBlock& block) override {
    OverwrittenArrays fresh;
    GYRE_CHECK(
        !block.overwrite || (block.out.rows == block.q.rows && block.lse.rows == block.q.rows),
        "{} and {} rows for the results of {} queries", block.out.rows, block.lse.rows,
        block.q.rows);
    if (block.overwrite) fresh.q = {{block.out, 0.0F}, {block.lse, -infinity_of<float>}};
    ForwardBlock given = block;
    rows_are_finite_ = false;
    const Left left = each_batch(block, sizes_of(block), fresh, unsupported_reason(block, {}),
                                 [&](const ReadyPlan& plan, const PreparedBatch& b) {
                                   if (forward_even(block, plan, b)) return true;
                                   give_finite_rows(given, ragged_shape(block, b), plan);
                                   return forward_batch(given, plan, b);
                                 });
    run_reversed(left, block);
    if (left.rectangles.empty()) return;
    ForwardBlock tiled = block;
    tiled.rectangles = left.rectangles;
    tiled.overwrite = false;
    tiled_->forward(tiled);
  }

  void backward(const BackwardBlock& block) override {
    OverwrittenArrays fresh;
    GYRE_CHECK(!block.overwrite_d_q || block.d_q.rows == block.q.rows,
               "{} rows of dQ for {} queries", block.d_q.rows, block.q.rows);
    GYRE_CHECK(!block.overwrite_d_kv || block.d_k.rows == block.k.rows, "{} rows of dK for {} keys",
               block.d_k.rows, block.k.rows);
    if (block.overwrite_d_q) fresh.q = {{block.d_q, 0.0F}};
    stand_ins_are_there_ = false;
    if (block.overwrite_d_kv) fresh.k = {{block.d_k, 0.0F}, {block.d_v, 0.0F}};
    BackwardBlock given = block;
    rows_are_finite_ = false;
    const Left left = each_batch(
        block, sizes_of(block), fresh, unsupported_reason(block, block.d_out),
        [&](const ReadyPlan& plan, const PreparedBatch& b) {
          if (backward_even(block, plan, b)) return true;
          if (give_finite_rows(given, ragged_gradient_shape(block, b, {}), plan)) {
            stand_ins_are_there_ = false;  // existing ones may have NaN in rows of no entry
            given.d_out = finite_.of(AttentionTensor::d_out, block.d_out, plan.q_outside);
            given.out = {};  // a stand-in has 0 in rows of no entry
          }
          return backward_batch(given, plan, b);
        });
    if (left.is_empty()) return;
    if (block.make_delta) block.make_delta();
    run_reversed(left, block);
    if (left.rectangles.empty()) return;
    BackwardBlock tiled = block;
    tiled.rectangles = left.rectangles;
    tiled.overwrite_d_q = tiled.overwrite_d_kv = false;
    tiled_->backward(tiled);
  }

  bool can_overwrite() const override { return true; }
  bool asks_for_delta() const override { return true; }

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
    if (reversed_rectangles_ > 0)
      add(fmt::format("rows of {} rectangles are reversed", reversed_rectangles_));
    if (added_q_ + added_k_ > 0)
      add(fmt::format(
          "results of {} query rows and {} key rows are added to those of earlier batches",
          added_q_, added_k_));
    if (graphs_.unordered()) add(library_->name() + "'s dQ is summed in no fixed order");
    if (finite_.bytes() > 0)
      add(fmt::format("{} multiplies rows that it masks: {} bytes of copies with rows of zeros",
                      library_->name(), finite_.bytes()));
    if (graphs_.used() > 0)
      add(fmt::format("{} graphs built for {} batches", graphs_.built(), graphs_.used()));
    return text;
  }

 private:
  /// Results that a call overwrites, each with the value of rows to which nothing is added.
  struct OverwrittenArrays {
    std::vector<std::pair<MatrixRef, float>> q, k;
  };
  void clear(const std::vector<std::pair<MatrixRef, float>>& results, const DeviceRound& round) {
    for (const auto& [matrix, value] : results) cuda_fill_rows(round, matrix, value, stream_);
  }

  /// The part of a call that its batches do not compute.
  struct Left {
    std::vector<Rectangle> rectangles;      ///< for the tiled kernel
    std::shared_ptr<const ReadyPlan> plan;  ///< none: no part of the call is the library's
    bool has_inverse() const { return plan && !plan->reversed.rectangles.empty(); }
    bool is_empty() const { return rectangles.empty() && !has_inverse(); }
  };

  void run(const ForwardBlock& block) { forward(block); }
  void run(const BackwardBlock& block) { backward(block); }
  /// Computes the inverse rectangles of a call, by a call on reversed rows.
  template <class Block>
  void run_reversed(const Left& left, const Block& block) {
    if (!left.has_inverse()) return;
    const ReversedCall& call = left.plan->reversed;
    const Block reversed = reversed_.reversed(block, call);
    run(reversed);
    reversed_.add(reversed, call, block);
    reversed_rectangles_ += std::ssize(call.rectangles);
    added_q_ += call.q_rows;
    if (left.plan->sizes.backward) added_k_ += call.k_rows;
  }

  /// Calls run(plan, batch) for every batch that the library may compute; it returns whether the
  /// library did. Clears the overwritten rows of what is left.
  template <class Run>
  Left each_batch(const BlockInput& block, const TableSizes& sizes, const OverwrittenArrays& fresh,
                  const char* reason, Run run) {
    if (reason != nullptr) {
      rectangles_ += std::ssize(block.rectangles);
      tiled_rectangles_[reason] += std::ssize(block.rectangles);
      clear(fresh.q, {nullptr, 1, sizes.rows});
      clear(fresh.k, {nullptr, 1, sizes.keys});
      return {{block.rectangles.begin(), block.rectangles.end()}, nullptr};
    }
    const std::shared_ptr<const ReadyPlan> kept = ready_plan(block, sizes);
    const ReadyPlan& plan = *kept;
    clear(fresh.q, plan.q_rest);
    clear(fresh.k, plan.k_rest);
    std::vector<Rectangle> rest = plan.others;
    rectangles_ += std::ssize(rest);
    for (int i = 0; i < not_ragged_reasons; ++i)
      if (const int64_t count = plan.reasons[i]; count > 0)
        tiled_rectangles_[name_of(static_cast<NotRagged>(i))] += count;
    for (const PreparedBatch& ready : plan.batches) {
      rectangles_ += std::ssize(ready.batch.entries);
      if (run(plan, ready)) {
        if (!ready.first_q) added_q_ += ready.batch.q_rows;
        if (!ready.first_k && sizes.backward) added_k_ += ready.batch.k_rows;
      } else {
        const std::vector<Rectangle> refused = rectangles_of(ready.batch);
        rest.insert(rest.end(), refused.begin(), refused.end());
        if (ready.first_q) clear(fresh.q, ready.q_rounds.front());
        if (ready.first_k) clear(fresh.k, ready.k_rounds.front());
      }
      if (block.progress) block.progress();
    }
    std::stable_sort(rest.begin(), rest.end(),
                     [](const Rectangle& a, const Rectangle& b) { return a.q_begin < b.q_begin; });
    return {std::move(rest), kept};
  }

  static TableSizes sizes_of(const BlockInput& block) {
    const BlockHeads& h = block.heads;
    TableSizes sizes;
    sizes.rows = block.q.rows;
    sizes.keys = block.k.rows;
    sizes.q = block.q.stride;
    sizes.k = block.k.stride;
    sizes.v = block.v.stride;
    sizes.q_columns = h.heads * h.head_dim;
    sizes.k_columns = h.kv_heads * h.head_dim;
    sizes.v_columns = h.kv_heads * h.value_dim();
    sizes.out_columns = h.heads * h.value_dim();
    sizes.heads = h.heads;
    return sizes;
  }
  static TableSizes sizes_of(const ForwardBlock& block) {
    TableSizes sizes = sizes_of(static_cast<const BlockInput&>(block));
    sizes.out = block.out.stride;
    sizes.lse = block.lse.stride;
    return sizes;
  }
  static TableSizes sizes_of(const BackwardBlock& block) {
    TableSizes sizes = sizes_of(static_cast<const BlockInput&>(block));
    sizes.backward = true;
    sizes.out = block.out.stride;
    sizes.lse = block.lse.stride;
    sizes.d_out = block.d_out.stride;
    sizes.d_q = block.d_q.stride;
    return sizes;
  }

  std::shared_ptr<const ReadyPlan> ready_plan(const BlockInput& block, const TableSizes& sizes) {
    for (const auto& plan : plans_)
      if (plan->sizes == sizes && plan->fixed_tiles == block.fixed_tiles &&
          std::equal(plan->rectangles.begin(), plan->rectangles.end(), block.rectangles.begin(),
                     block.rectangles.end()))
        return plan;
    if (std::ssize(plans_) == max_plans) {
      stream_.synchronize();  // copies of tables may be in progress
      plans_.clear();
    }
    return plans_.emplace_back(
        make_ready(block.rectangles, sizes, block.fixed_tiles, *library_, stream_));
  }

  /// If the library would read NaN from rows of no entry, replaces the inputs by copies, once per
  /// call. Returns whether this call did so.
  bool give_finite_rows(BlockInput& block, const AttentionGraphShape& shape,
                        const ReadyPlan& plan) {
    if (rows_are_finite_ || plan.q_outside.count + plan.k_outside.count == 0 ||
        !library_->multiplies_masked_rows(shape))
      return false;
    block.q = finite_.of(AttentionTensor::q, block.q, plan.q_outside);
    block.k = finite_.of(AttentionTensor::k, block.k, plan.k_outside);
    block.v = finite_.of(AttentionTensor::v, block.v, plan.k_outside);
    return rows_are_finite_ = true;
  }

  /// Counts the rectangles of a batch whose graph was refused.
  bool refused(const AttentionGraphShape& shape, const PreparedBatch& ready) {
    tiled_rectangles_["refused by " + library_->name() + ": " +
                      graphs_.problem(shape).substr(0, 80)] += std::ssize(ready.batch.entries);
    return false;
  }

  void execute(AttentionGraph& graph, const BatchArrays& arrays) {
    graph.execute(arrays.addresses(), workspace_.at_least(graph.workspace_bytes()));
  }

  bool forward_batch(const ForwardBlock& block, const ReadyPlan& plan, const PreparedBatch& ready) {
    const AttentionGraphShape shape = ragged_shape(block, ready);
    if (is_whole(ready, block.out) && forward_in_place(block, plan, ready, shape)) return true;
    return forward_to_scratch(block, plan, ready, shape) || refused(shape, ready);
  }
  /// False if the batch is not even, or the library has no engine for it.
  bool forward_even(const ForwardBlock& block, const ReadyPlan& plan, const PreparedBatch& ready) {
    if (!ready.even) return false;
    AttentionGraphShape shape = even_shape(block, ready), in_place = shape;
    in_place.out_distance = shape.q_distance;
    return forward_in_place(block, plan, ready, in_place) ||
           forward_to_scratch(block, plan, ready, shape);
  }

  /// False if results cannot be written directly to the caller's arrays.
  bool forward_in_place(const ForwardBlock& block, const ReadyPlan& plan,
                        const PreparedBatch& ready, AttentionGraphShape shape) {
    using enum AttentionTensor;
    // A ragged batch gets the address of an aligned row, an even one that of its first row.
    MatrixView<float> first_lse = block.lse;
    if (shape.even) first_lse.data += ready.batch.entries.front().q_begin * first_lse.stride;
    if (!block.overwrite || !ready.first_q || !usable(block.out, DType::bf16) ||
        !usable(first_lse, DType::f32))
      return false;
    shape.out_stride = block.out.stride;
    shape.lse_stride = block.lse.stride;
    AttentionGraph* graph = graphs_.of(shape);
    if (graph == nullptr) return false;
    BatchArrays arrays(plan, ready, shape.even);
    arrays.add_inputs(block.q, block.k, block.v);
    arrays.add(out, block.out, out_offsets, ready.in_place);
    arrays.add(lse, MatrixRef(block.lse), lse_offsets, ready.in_place);
    execute(*graph, arrays);
    return true;
  }
  /// False if the library does not support the shape.
  bool forward_to_scratch(const ForwardBlock& block, const ReadyPlan& plan,
                          const PreparedBatch& ready, const AttentionGraphShape& shape) {
    using enum AttentionTensor;
    AttentionGraph* graph = graphs_.of(shape);
    if (graph == nullptr) return false;
    BatchArrays arrays(plan, ready, shape.even);
    arrays.add_inputs(block.q, block.k, block.v);
    const MatrixRef part = out_.matrix(DType::bf16, ready.q_rows, block.out.cols),
                    part_lse = lse_.matrix(DType::f32, ready.q_rows, block.lse.cols);
    arrays.add(out, part, out_offsets, ready.tables);
    arrays.add(lse, part_lse, lse_offsets, ready.tables);
    execute(*graph, arrays);
    const Update update = block.overwrite && ready.first_q ? Update::replace : Update::add;
    for (const DeviceRound& round : ready.q_rounds)
      cuda_merge_rows(round, part, part_lse.as<float>(), block.out, block.lse, update, stream_);
    return true;
  }

  /// Whether the batch writes all rows of the result, and no others. Only then may a ragged batch
  /// write it directly: the library does not specify what it writes between entries.
  static bool is_whole(const PreparedBatch& ready, ConstMatrixRef result) {
    return ready.batch.q_rows == result.rows && ready.q_rows == result.rows;
  }

  bool backward_batch(const BackwardBlock& block, const ReadyPlan& plan,
                      const PreparedBatch& ready) {
    DirectArrays direct = direct_arrays(block, ready);
    direct.d_q = direct.d_q && is_whole(ready, block.d_q);
    return differentiate(block, plan, ready, direct, false) ||
           differentiate(block, plan, ready, {}, false) ||
           refused(ragged_gradient_shape(block, ready, {}), ready);
  }
  /// False if the batch is not even, or the library has no engine for it.
  bool backward_even(const BackwardBlock& block, const ReadyPlan& plan,
                     const PreparedBatch& ready) {
    return ready.even && differentiate(block, plan, ready, direct_arrays(block, ready), true);
  }

  void make_stand_ins(const BackwardBlock& block, const ReadyPlan& plan, MatrixRef out,
                      MatrixRef lse) {
    if (block.make_delta) block.make_delta();
    cuda_stand_in_rows(plan.q_touched, block.d_out, block.lse, block.delta, out, lse.as<float>(),
                       stream_);
    if (!rows_are_finite_) return;
    for (const MatrixRef m : {out, lse}) cuda_fill_rows(plan.q_outside, m, 0, stream_);
  }

  /// K or V of a ragged batch, copied to the layout of its d_k and d_v.
  ConstMatrixRef gathered(Scratch& memory, ConstMatrixRef from, const PreparedBatch& ready) {
    const MatrixRef rows = memory.matrix(DType::bf16, ready.k_rows, from.cols);
    cuda_add_rows(ready.gathered_keys, from, rows, Update::replace, stream_);
    return rows;
  }

  void add_inputs(BatchArrays& arrays, const BackwardBlock& block, const PreparedBatch& ready,
                  bool even) {
    using enum AttentionTensor;
    arrays.add_inputs(block.q, block.k, block.v);
    arrays.add(d_out, block.d_out, d_out_offsets, ready.tables);
    if (even || !gathers_keys(block)) return;
    arrays.add(k, gathered(k_, block.k, ready), k_offsets, ready.gathered);
    arrays.add(v, gathered(v_, block.v, ready), v_offsets, ready.gathered);
  }

  /// False if the library does not support the shape.
  bool differentiate(const BackwardBlock& block, const ReadyPlan& plan, const PreparedBatch& ready,
                     DirectArrays direct, bool even) {
    using enum AttentionTensor;
    AttentionGraph* graph = graphs_.of(even ? even_gradient_shape(block, ready, direct)
                                            : ragged_gradient_shape(block, ready, direct));
    if (graph == nullptr) return false;
    const TableSizes& sizes = plan.sizes;
    BatchArrays arrays(plan, ready, even);
    add_inputs(arrays, block, ready, even);
    if (direct.out) {
      arrays.add(out, block.out, out_offsets, ready.in_place);
      arrays.add(lse, ConstMatrixRef(block.lse), lse_offsets, ready.in_place);
    } else {
      const MatrixRef stand_in = out_.matrix(DType::bf16, block.q.rows, sizes.out_columns),
                      final_lse = lse_.matrix(DType::f32, block.q.rows, block.heads.heads);
      if (!std::exchange(stand_ins_are_there_, true))
        make_stand_ins(block, plan, stand_in, final_lse);
      arrays.add(out, stand_in, out_offsets, ready.tables);
      arrays.add(lse, final_lse, lse_offsets, ready.tables);
    }
    const MatrixRef part_q =
        direct.d_q ? block.d_q : d_q_.matrix(DType::bf16, ready.q_rows, sizes.q_columns);
    const MatrixRef part_k = d_k_.matrix(DType::bf16, ready.k_rows, sizes.k_columns),
                    part_v = d_v_.matrix(DType::bf16, ready.k_rows, sizes.v_columns);
    arrays.add(d_q, part_q, d_q_offsets, direct.d_q ? ready.in_place : ready.tables);
    arrays.add(d_k, part_k, d_k_offsets, ready.tables);
    arrays.add(d_v, part_v, d_v_offsets, ready.tables);
    if (even) arrays.add(lse, packed_lse(block, ready));
    execute(*graph, arrays);
    const Update update_q = block.overwrite_d_q && ready.first_q ? Update::replace : Update::add,
                 update_k = block.overwrite_d_kv && ready.first_k ? Update::replace : Update::add;
    for (const DeviceRound& round : ready.q_rounds)
      if (!block.d_q.empty() && !direct.d_q)
        cuda_add_rows(round, part_q, block.d_q, update_q, stream_);
    for (const DeviceRound& round : ready.k_rounds)
      if (block.d_k.data != nullptr) {
        const RowSums sums[] = {{part_k, block.d_k}, {part_v, block.d_v}};
        cuda_add_rows(round, sums, update_k, stream_);
      }
    return true;
  }

  /// Transposes the log-sum-exps of an even batch to [entries, heads, rows]; returns the result.
  float* packed_lse(const BackwardBlock& block, const PreparedBatch& ready) {
    const RaggedBatch& batch = ready.batch;
    const MatrixRef to = packed_lse_.matrix(DType::f32, batch.q_rows, block.heads.heads);
    cuda_pack_lse(block.lse, batch.entries.front().q_begin, ready.even->q_distance,
                  std::ssize(batch.entries), batch.longest_q, to.as<float>().data, stream_);
    return to.as<float>().data;
  }

  Stream& stream_;
  std::unique_ptr<AttentionLibrary> library_;
  std::unique_ptr<BlockKernel> tiled_;
  FiniteCopies finite_;
  ReversedArrays reversed_;
  AttentionGraphs graphs_;
  std::vector<std::shared_ptr<const ReadyPlan>> plans_;
  Scratch out_, lse_, packed_lse_, k_, v_, d_q_, d_k_, d_v_, workspace_;
  int64_t rectangles_ = 0;                           // entries of batches, and other rectangles
  std::map<std::string, int64_t> tiled_rectangles_;  // by reason
  int64_t reversed_rectangles_ = 0;
  int64_t added_q_ = 0, added_k_ = 0;  // rows of batches that do not overwrite
  bool stand_ins_are_there_ = false;   // of this call
  bool rows_are_finite_ = false;       // inputs of this call are copies without NaN
};

}  // namespace

std::unique_ptr<BlockKernel> make_ragged_kernel(Stream& stream,
                                                std::unique_ptr<AttentionLibrary> library,
                                                bool deterministic) {
  return std::make_unique<RaggedKernel>(stream, std::move(library), deterministic);
}

}  // namespace gyre
