#pragma once
// Executes the plan of a rank with a Communicator and a BlockKernel, in the memory space of a
// stream.
//
//     AttentionExecutor attention(plan, heads, types, group, kernel, stream, workspace);
//     fill attention.matrix(ArrayKind::q), .keys(), .values()
//     attention.run(Pass::forward);             results in .matrix(ArrayKind::out)
//     fill attention.matrix(ArrayKind::d_out)
//     attention.run(Pass::backward);            results in .matrix(ArrayKind::d_q), .d_keys(), ...
//
// The host walks the steps. On a device it only submits them and runs ahead of the computation: at
// a Wait the stream waits for the messages, the host does not.
//
//     host      post KV | compute | Wait KV | compute | ... | synchronize: results are complete
//     stream            pack | own keys ------- | keys of rank 2 --- | ...
//     messages               | KV --------- |
//
// Alternatively the stream records the steps, which are the same in every run of a pass, and later
// runs submit the recording with one call.
//
// HostCopy and HostFill (array_ops.hpp) read and fill arrays on a device.

#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "attention/array_ops.hpp"
#include "attention/kernels/block_kernel.hpp"
#include "attention/plan.hpp"
#include "attention/workspace.hpp"
#include "comm/communicator.hpp"
#include "runtime/buffer.hpp"
#include "runtime/host_copy.hpp"
#include "runtime/row_copy.hpp"
#include "runtime/trace.hpp"

namespace gyre {

/// Time spent in one execution, in seconds, measured on the host or on the device's stream. On a
/// device a step lasts from the end of the previous step and so includes the time until the host
/// submits it.
struct ExecutionTimes {
  double compute = 0;  ///< in the block kernel, including its calls of progress()
  double wait = 0;     ///< in Wait steps: communication that compute does not hide
  double copy = 0;     ///< packing, unpacking, adding received gradients, clearing, delta, sinks
  double total = 0;
};

/// Which steps of a plan to run. With compute_only the kernels read data received by an earlier
/// run; with communication_only the messages carry the current contents of the arrays.
enum class Execute { all, compute_only, communication_only };

class AttentionExecutor {
  class Walker;

 public:
  /// Submitted or recorded steps of a run.
  struct Submission {
    std::shared_ptr<Walker> walker;  ///< holds the time marks
    MarkPtr end = {};
    std::vector<WorkPtr> communication = {};  ///< operations for which the device stream waits
  };

  /// Allocates the arrays of the forward pass, and of the backward pass if wanted, in the memory
  /// space of `stream`, to which it submits all work. `group` is the context-parallel group, where
  /// this rank is plan.rank. `group` and `kernel` work in the same space. All references must
  /// outlive the executor.
  AttentionExecutor(const RankPlan& plan, const HeadShape& heads, const ElementTypes& types,
                    Communicator& group, BlockKernel& kernel, Stream& stream,
                    AttentionWorkspace& workspace, bool with_backward);

  /// Sets learnable sinks [heads], one logit per query head; empty: no sinks. They are in host
  /// memory or the stream's and must outlive the executor. Later runs use them.
  void set_sinks(std::span<const float> sinks) { sinks_ = sinks; }
  Stream& stream() { return stream_; }
  /// Later runs add their spans to `trace`; null turns recording of spans off.
  void set_trace(Trace* trace) { trace_ = trace; }
  /// If on, the first run of each Pass and Execute submits its steps one by one, the second records
  /// them, later ones submit the recording with one call. All start over when this process frees
  /// device memory, which a recording may use. Ignored by runs with a trace. Requires a stream that
  /// can record, and a group that can_record() unless the plan has no exchanges. Registers arrays
  /// of library all-gathers with their group where possible. Collective over the group.
  void record_runs(bool on);
  /// Number of arrays that record_runs() registered.
  int64_t windows() const { return std::ssize(windows_); }
  /// Number of operations that the latest run submitted as one recording; 0 if one by one.
  int64_t replayed() const { return replayed_; }

  /// Views of the rank's own arrays in the stream's memory space: [slots, heads · head_dim], or
  /// heads · value_dim; kv and d_kv [slots, kv_heads · (head_dim + value_dim)]; stats
  /// [slots, 2 · heads] (LSE, delta).
  MatrixRef matrix(ArrayKind kind) { return matrix_of(own(kind)); }
  /// View of any array of the plan, as of its own. Arrays that share memory hold what the steps
  /// wrote last.
  MatrixRef matrix_of(int index);
  MatrixRef keys() { return plane(own(ArrayKind::kv), 0); }
  MatrixRef values() { return plane(own(ArrayKind::kv), 1); }
  MatrixRef d_keys() { return plane(own(ArrayKind::d_kv), 0); }
  MatrixRef d_values() { return plane(own(ArrayKind::d_kv), 1); }
  /// Final log-sum-exps after a forward pass, [rows, heads] of plan.arrays[plan.stats].
  MatrixView<const float> lse() { return final_stats(0); }
  /// Plane 0: final log-sum-exps. Plane 1: deltas, after a backward pass.
  MatrixView<const float> final_stats(int64_t p) { return plane(plan_.stats, p).as<float>(); }

  /// Runs one pass. Padding rows, which are in no rectangle, get out = 0, LSE = -inf and gradient
  /// 0. Collective over the group. The backward pass needs the arrays as the forward pass left
  /// them. Results are complete on return, also on a device.
  ExecutionTimes run(Pass pass, Execute what = Execute::all);
  /// start() and finish() are the halves of a run() that neither records nor replays. On a device,
  /// start() only submits the steps: work that is submitted later follows them, and further runs
  /// may start before this one is finished. Every run must be finished.
  Submission start(Pass pass);
  /// Waits for all work of a run, copies the gradients of sinks to the host, and returns the times.
  ExecutionTimes finish(Pass pass, const Submission& submission);
  /// Gradient of the sinks after a backward pass, summed over the group: [heads].
  const std::vector<double>& d_sinks() const { return d_sinks_; }

 private:
  /// Sub-allocates one buffer for the slices of a message that cannot be sent or received in place,
  /// in their order, so that a message of only such slices is contiguous.
  class Staging;
  struct Received {
    Slice slice;
    std::span<std::byte> data;
  };
  /// A posted exchange with the staging buffers of its messages.
  struct Pending {
    const step::Exchange* exchange = nullptr;
    WorkPtr work = {};
    std::vector<Buffer<float>> staging = {};
    std::vector<Received> received = {};
    bool done = false;
    size_t span = 0;  ///< index into spans_, with a trace
  };
  struct Recording {
    Submission submission = {};
    Traffic traffic = {};
    int64_t releases = -1;                ///< count of device memory releases before recording
    std::unique_ptr<RecordedWork> steps;  ///< null: not recorded yet
  };
  /// A transfer in the trace. Its marks are read after the run.
  struct Span {
    const step::Exchange* exchange;
    int step;
    std::vector<TraceMessage> sent, received;
    MarkPtr begin;
    MarkPtr end = {};  ///< set when the transfer is found to be complete
  };

  const PlanArray& array(int index) const { return plan_.arrays[index]; }
  Slice whole(int index) const { return {index, 0, array(index).tokens(), array(index).heads}; }
  /// Plane `p` of an array, all heads.
  MatrixRef plane(int index, int64_t p);
  /// The columns of the heads `part` in plane `p` of an array.
  MatrixRef columns(int index, int64_t p, HeadRange part);

  /// `step`: index in the list of steps.
  void post(const step::Exchange& s, int step);
  /// Messages of an exchange and the copies that must precede them.
  struct Posting {
    std::vector<SendSlice> sends;
    std::vector<RecvSlice> recvs;
    std::vector<RowCopy> copies;
  };
  Posting messages_of(const step::Exchange& s, Pending& pending);
  /// Posting of a library collective: one send and one receive span; for an all-to-all one of each
  /// per member of the group, in consecutive memory.
  Posting library_parts_of(const step::Exchange& s, Pending& pending);
  WorkPtr submit(const step::Exchange& s, const Posting& posting);
  /// A staging buffer of the exchange; empty for 0 bytes.
  std::span<std::byte> stage(int64_t bytes, Pending& pending);
  /// Adds to `copies` the copy of a slice into a message at `to`. Returns `to`.
  std::span<const std::byte> pack(const Slice& slice, std::span<std::byte> to,
                                  std::vector<RowCopy>& copies);
  /// Bytes to or from each other rank.
  std::vector<TraceMessage> traced(const std::vector<Message>& messages) const;
  void complete(int id);
  void add_spans(Pass pass);
  void unpack(int id);
  /// Makes all work submitted from now on wait for `work`, a communication. On a device `work` is
  /// kept until the end of the run.
  void wait_on_stream(WorkPtr work);
  void add_local_copies(const step::Exchange& s, std::vector<RowCopy>& copies);
  std::span<std::byte> place(const Slice& slice);
  /// Addresses of a slice in its array, and in a message, where it is contiguous.
  RowPlace in_array(const Slice& slice);
  RowPlace in_message(const Slice& slice, std::byte* data) const;
  /// Appends copies of the rows of a slice, rounded to the type of messages: one of all planes, or
  /// one of each if their widths differ.
  void add_copies(const Slice& slice, const RowPlace& from, const RowPlace& to, bool add,
                  std::vector<RowCopy>& copies) const;
  /// Appends copies of a slice out of the message at `message`. The sum of gradients of shared
  /// elements goes to the first head of the slice; without `add` the others' become 0.
  void add_unpacking(const Slice& slice, std::byte* message, std::vector<RowCopy>& copies);
  /// Sums the gradients of shared elements of keys into the first head of the slice; the others'
  /// become 0.
  void sum_shared_keys(const Slice& slice);
  /// Appends copies of a slice into its message, or (`unpacks`) out of it. The message has the
  /// shared elements of keys once.
  void add_shared_copies(const Slice& slice, std::byte* message, bool unpacks,
                         std::vector<RowCopy>& copies);
  /// Clears an array. If the kernel can overwrite, defers the clear to the first call that writes
  /// the array.
  void clear(int index);
  /// Carries out the clear of an array if it is deferred.
  void clear_deferred(int index);
  /// Whether the next call may overwrite `heads` of these arrays, which it writes: the clears of
  /// all of them are deferred and `heads` covers each array. If so, drops the deferred clears;
  /// otherwise carries them out.
  bool replaces_clears(std::initializer_list<int> arrays, HeadRange heads);
  void compute(const step::Compute& s, Pass pass);
  void merge(const step::Merge& s);
  void finish(const step::Finish& s);
  /// Defers the computation to the first reader if the kernel asks for delta.
  void delta(const step::Delta& s);
  /// Computes delta if that is deferred.
  void make_delta();
  /// Calls make_delta() before a step sends, receives or clears the array, if delta, out or d_out
  /// has its storage.
  void make_delta_before(int index);
  void sink_gradient(const step::SinkGradient& s);
  void progress();
  void begin_sinks(Pass pass);
  /// The sinks of the heads of an array, in the stream's memory space.
  const float* sinks_of(const PlanArray& stats) const;
  void register_gathered_arrays();
  Submission submit(Pass pass, Execute what);
  ExecutionTimes run_recorded(Pass pass, Execute what);

  const RankPlan& plan_;
  HeadShape heads_;
  ElementTypes types_;
  Communicator& group_;
  BlockKernel& kernel_;
  Stream& stream_;
  AttentionWorkspace& workspace_;
  SinkGradients sink_gradients_;
  std::span<const float> sinks_;
  Buffer<float> device_sinks_;   // [heads], copy of the sinks on a device; empty on the host
  Buffer<float> zeros_;          // [shared_key_dim], once they are needed
  Buffer<double> sums_;          // [heads], gradients of the sinks in the stream's space
  std::vector<double> d_sinks_;  // [heads], gradients of the sinks on the host after a run
  Trace* trace_ = nullptr;
  std::vector<std::span<std::byte>> data_;  // [arrays]
  std::set<int> deferred_clears_;           // array indices
  std::optional<step::Delta> delta_;        // latest Delta step of this run
  bool delta_is_deferred_ = false;
  std::map<int, Pending> pending_;  // by exchange id
  std::vector<WorkPtr> in_stream_;  // operations for which the device stream waits
  std::vector<Span> spans_;
  bool records_ = false;
  int64_t replayed_ = 0;
  std::vector<std::shared_ptr<void>> windows_;
  std::map<std::pair<Pass, Execute>, Recording> recordings_;
};

}  // namespace gyre
