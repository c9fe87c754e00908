#pragma once
// Executes a rank's plan with a Communicator and a BlockKernel.
//
//     AttentionExecutor attention(plan, heads, types, group, kernel, stream, workspace);
//     fill attention.matrix(ArrayKind::q), .keys(), .values()
//     attention.run(Pass::forward);             results in .matrix(ArrayKind::out)
//     fill attention.matrix(ArrayKind::d_out)
//     attention.run(Pass::backward);            results in .matrix(ArrayKind::d_q), .d_keys(), ...

#include <map>
#include <optional>
#include <span>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/plan.hpp"
#include "comm/communicator.hpp"
#include "runtime/buffer.hpp"
#include "runtime/trace.hpp"

namespace gyre {

/// Memory of the arrays of plans, by storage number, and of the copies that messages need. Kept
/// over executors (layers, bins), so that it is allocated once; grows as asked.
class AttentionWorkspace {
 public:
  /// At least `bytes` bytes. What a storage held is lost when it grows.
  std::span<std::byte> storage(int id, int64_t bytes);
  /// Takes a free staging buffer of at least `bytes` bytes, or makes one; to be given back.
  Buffer<float> take_staging(int64_t bytes);
  void give_back(Buffer<float> staging);
  int64_t bytes() const;

 private:
  std::map<int, Buffer<float>> storages_;
  std::vector<Buffer<float>> free_;
  int64_t staging_bytes_ = 0;
};

/// Time spent in one execution, seconds.
struct ExecutionTimes {
  double compute = 0;  ///< in the block kernel, calls of the communication engine included
  double wait = 0;     ///< in Wait steps: communication not hidden by compute
  double copy = 0;     ///< packing, unpacking, adding what was received, clearing, delta
  double total = 0;
};

/// What of a plan to run. Without communication the kernels read what an earlier run left in the
/// receive arrays; without compute the messages carry what is there.
enum class Execute { all, compute_only, communication_only };

class AttentionExecutor {
 public:
  /// Allocates the arrays of the given passes. `group` is the context-parallel group, in which this
  /// rank is plan.rank. All references must outlive the executor, which owns a copy of nothing.
  AttentionExecutor(const RankPlan& plan, const HeadShape& heads, const ElementTypes& types,
                    Communicator& group, BlockKernel& kernel, Stream& stream,
                    AttentionWorkspace& workspace, bool with_backward);

  /// Learnable sinks [heads], one logit for each query head; none when empty. Must outlive the
  /// executor.
  void set_sinks(std::span<const float> sinks) { sinks_ = sinks; }
  void set_trace(Trace* trace) { trace_ = trace; }

  /// The rank's own arrays as [slots, heads · head_dim]; stats as [slots, 2 · heads] (LSE, delta).
  MatrixRef matrix(ArrayKind kind) { return matrix_of(own(kind)); }
  MatrixRef keys() { return plane(own(ArrayKind::kv), 0); }
  MatrixRef values() { return plane(own(ArrayKind::kv), 1); }
  MatrixRef d_keys() { return plane(own(ArrayKind::d_kv), 0); }
  MatrixRef d_values() { return plane(own(ArrayKind::d_kv), 1); }
  /// Final log-sum-exps after a forward pass, [rows, heads] of plan.arrays[plan.stats].
  MatrixView<const float> lse() { return final_stats(0); }
  /// The same, or (plane 1) their deltas after a backward pass.
  MatrixView<const float> final_stats(int64_t p) { return plane(plan_.stats, p).as<float>(); }

  /// Runs one direction. Padding rows (in no rectangle) get out = 0, LSE = -inf and no gradient.
  /// Collective over the group. backward needs the arrays as forward left them.
  ExecutionTimes run(Pass pass, Execute what = Execute::all);
  /// Gradient of the sinks after a backward pass: [heads], the sum over the group.
  const std::vector<double>& d_sinks() const { return d_sinks_; }

 private:
  class Walker;
  struct Copy {
    Slice slice;
    Buffer<float> staging;
  };
  struct Pending {
    WorkPtr work;
    std::vector<Buffer<float>> sent;
    std::vector<Copy> received;
    std::string what;
    double begin = 0;
    bool done = false;
    double end = 0;
  };

  const PlanArray& array(int index) const { return plan_.arrays[static_cast<size_t>(index)]; }
  MatrixRef matrix_of(int index);
  /// One plane of all heads of an array.
  MatrixRef plane(int index, int64_t p);
  /// Columns of `part`, heads of the array's, in one plane.
  MatrixRef columns(int index, int64_t p, HeadRange part);

  void post(const step::Exchange& s);
  void complete(int id);
  void copy_locally(const step::Exchange& s);
  std::span<std::byte> place(const Slice& slice);
  void pack(const Slice& slice, std::span<std::byte> to);
  void unpack(const Slice& slice, std::span<const std::byte> from);
  void clear(int index);
  void compute(const step::Compute& s, Pass pass);
  void finish(const step::Finish& s);
  void delta(const step::Delta& s);
  void sink_gradient(const step::SinkGradient& s);
  void progress();

  const RankPlan& plan_;
  HeadShape heads_;
  ElementTypes types_;
  Communicator& group_;
  BlockKernel& kernel_;
  Stream& stream_;
  AttentionWorkspace& workspace_;
  std::span<const float> sinks_;
  std::vector<double> d_sinks_;
  Trace* trace_ = nullptr;
  std::vector<std::span<std::byte>> data_;  // [arrays]
  std::map<int, Pending> pending_;
};

}  // namespace gyre
