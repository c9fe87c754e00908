#pragma once
// Executes a rank's plan with a Communicator and a BlockKernel, where the stream's arrays lie.
//
//     AttentionExecutor attention(plan, heads, types, group, kernel, stream, workspace);
//     fill attention.matrix(ArrayKind::q), .keys(), .values()
//     attention.run(Pass::forward);             results in .matrix(ArrayKind::out)
//     fill attention.matrix(ArrayKind::d_out)
//     attention.run(Pass::backward);            results in .matrix(ArrayKind::d_q), .d_keys(), ...
//
// The host walks the steps. On a device it only submits them, and is ahead of what is computed:
//
//     host      post KV | compute | hold KV | compute | ... | synchronize, results are there
//     stream            pack | own keys ------- | keys of rank 2 --- | ...
//     messages               | KV --------- |
//
// Arrays of a device are read and filled in by way of HostCopy and HostFill (array_ops.hpp).

#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "attention/array_ops.hpp"
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
  /// Where memory is taken from now on, at first the host's. What is held in another space is
  /// released. An executor calls it with its stream's.
  void use(MemorySpace space);
  /// At least `bytes` bytes. What a storage held is lost when it grows.
  std::span<std::byte> storage(int id, int64_t bytes);
  /// Takes a free staging buffer of at least `bytes` bytes, or makes one; to be given back.
  Buffer<float> take_staging(int64_t bytes);
  void give_back(Buffer<float> staging);
  int64_t bytes() const;

 private:
  MemorySpace space_ = MemorySpace::host;
  std::map<int, Buffer<float>> storages_;
  std::vector<Buffer<float>> free_;
  int64_t staging_bytes_ = 0;
};

/// Time spent in one execution, seconds: the host's, or that of the device's stream. There a step
/// lasts from the end of the last one, so that time in which the host had not yet submitted it
/// counts as its own.
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
  /// Allocates the arrays of the given passes in the space of `stream`, to which everything is
  /// submitted. `group` is the context-parallel group, in which this rank is plan.rank; it
  /// communicates, and `kernel` computes, in the same space. All references must outlive the
  /// executor.
  AttentionExecutor(const RankPlan& plan, const HeadShape& heads, const ElementTypes& types,
                    Communicator& group, BlockKernel& kernel, Stream& stream,
                    AttentionWorkspace& workspace, bool with_backward);

  /// Learnable sinks [heads], one logit for each query head; none when empty. Must outlive the
  /// executor.
  void set_sinks(std::span<const float> sinks) { sinks_ = sinks; }
  Stream& stream() { return stream_; }
  void set_trace(Trace* trace) { trace_ = trace; }

  // Views of arrays in the stream's space.
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
  /// Collective over the group. backward needs the arrays as forward left them. Everything is done
  /// at return, on a device too.
  ExecutionTimes run(Pass pass, Execute what = Execute::all);
  /// Gradient of the sinks after a backward pass: [heads], the sum over the group.
  const std::vector<double>& d_sinks() const { return d_sinks_; }

 private:
  class Walker;
  struct Received {
    Slice slice;
    Buffer<float> staging;
  };
  struct Pending {
    WorkPtr work;
    std::vector<Buffer<float>> sent;
    std::vector<Received> received;
    std::string what;
    bool done = false;
    MarkPtr begin, end;  ///< with a trace; end: once it is known to be done
  };
  /// A communication for the trace, whose marks are read when the stream has got there.
  struct Span {
    std::string what;
    MarkPtr begin, end;
  };

  const PlanArray& array(int index) const { return plan_.arrays[static_cast<size_t>(index)]; }
  MatrixRef matrix_of(int index);
  /// One plane of all heads of an array.
  MatrixRef plane(int index, int64_t p);
  /// Columns of `part`, heads of the array's, in one plane.
  MatrixRef columns(int index, int64_t p, HeadRange part);

  void post(const step::Exchange& s);
  void complete(int id);
  void unpack(int id);
  /// Makes what is submitted from now on come after an operation. On a device the operation is kept
  /// until the end of the run.
  void wait_on_stream(WorkPtr work);
  void add_local_copies(const step::Exchange& s, std::vector<RowCopy>& copies);
  std::span<std::byte> place(const Slice& slice);
  /// Where the rows and heads of a slice lie in their array, and one behind the other in a message.
  RowPlace in_array(const Slice& slice);
  RowPlace in_message(const Slice& slice, std::byte* data) const;
  RowCopy copy_of(const Slice& slice) const;
  /// Clears an array, or leaves that to the first call that writes it where the kernel can.
  void clear(int index);
  /// What was left to be cleared and is now needed.
  void settle_clear(int index);
  /// Whether a call that writes `heads` of these arrays is the first to write them, and all of
  /// them; it then has to.
  bool take_overwrite(std::initializer_list<int> arrays, HeadRange heads);
  void compute(const step::Compute& s, Pass pass);
  void finish(const step::Finish& s);
  void delta(const step::Delta& s);
  void sink_gradient(const step::SinkGradient& s);
  void progress();
  void begin_sinks(Pass pass);
  /// The sinks of the heads of an array, where kernels read them.
  const float* sinks_of(const PlanArray& stats) const;
  /// Waits for everything that a run has submitted, and fetches what the host wants of it.
  void settle(Pass pass);

  const RankPlan& plan_;
  HeadShape heads_;
  ElementTypes types_;
  Communicator& group_;
  BlockKernel& kernel_;
  Stream& stream_;
  AttentionWorkspace& workspace_;
  std::unique_ptr<ArrayOps> ops_;
  std::span<const float> sinks_;
  Buffer<float> device_sinks_;   // [heads], in the stream's space, if that is not the host's
  Buffer<double> sums_;          // [heads], in the stream's space: gradients of sinks
  std::vector<double> d_sinks_;  // the same on the host, after a run
  Trace* trace_ = nullptr;
  std::vector<std::span<std::byte>> data_;  // [arrays]
  std::set<int> deferred_clears_;           // arrays whose Clear is left to the kernel
  std::optional<step::Delta> delta_;        // how the deltas came about that are there
  std::map<int, Pending> pending_;
  std::vector<WorkPtr> held_;
  std::vector<Span> spans_;
};

}  // namespace gyre
