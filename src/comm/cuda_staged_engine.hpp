#pragma once
// Operations on device memory by way of MPI: their copies on the device, the start of the MPI call
// and their progress. Internal to cuda_staged.cpp.

#include <sched.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/coalesce.hpp"
#include "comm/cuda_copy_spans.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_event.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/watchdog.hpp"

namespace gyre::staging {

/// Memory in which MPI accesses the arrays of an operation.
enum class Reach {
  host,   ///< in pinned copies
  device  ///< in place; slices that are not contiguous are first gathered on the device
};

/// One operation in flight: device -> memory that MPI reads, MPI, memory that MPI writes -> device.
struct Operation {
  enum class State { copying_out, communicating, copying_in, done };

  explicit Operation(std::string_view name) : what(name) {}

  std::string what;
  State state = State::copying_out;
  std::optional<cudaStream_t> caller;  ///< empty if submitted from the host
  /// Copies of the data: in pinned memory for Reach::host, else of slices in device memory. An
  /// in-place reduction uses only `sent`.
  Buffer<std::byte> sent, received;
  Reach reach = Reach::host;
  std::span<const std::byte> from;  ///< memory that MPI reads
  std::span<std::byte> to;          ///< memory that MPI writes or reduces in place
  Buffer<float> widened;            ///< f32 copy of bf16 data: MPI does not reduce bf16
  std::function<WorkPtr()> start;   ///< the MPI operation
  std::function<void()> finish;     ///< on the host, between MPI and the copies to the device
  std::vector<CoalescedExchange::Copy> results;  ///< copies to the device, or within it
  WorkPtr mpi;
  CudaEvent submitted;   ///< after earlier work on the caller's stream
  CudaEvent copied_out;  ///< after the copies into memory that MPI reads
  CudaEvent copied_in;
};

/// Copies within the device by one kernel, others by one call each.
inline void copy_all(std::span<const CoalescedExchange::Copy> copies, Reach reach, Stream& stream) {
  if (reach == Reach::device) return cuda_copy_spans(copies, cuda_handle(stream));
  for (const auto& copy : copies) stream.copy(copy.to.data(), copy.from.data(), copy.from.size());
}

/// State shared by a communicator and all split from it: the copy streams and the operations in
/// flight, in order of submission.
class Engine {
 public:
  /// Uses two streams because a device copies in both directions at once.
  explicit Engine(Reach reach) : reach_(reach), out_(make_cuda_stream()), in_(make_cuda_stream()) {}

  Reach reach() const { return reach_; }
  Stream& out() { return *out_; }

  /// Orders later work on out() after the work already on `stream`.
  void begin(Operation& op, Stream& stream) {
    if (stream.space() != MemorySpace::device) return;
    op.caller = cuda_handle(stream);
    op.submitted.record(*op.caller);
    op.submitted.wait_on_stream(cuda_handle(*out_));
  }
  void submit(std::shared_ptr<Operation> op) {
    op->copied_out.record(cuda_handle(*out_));
    under_way_.push_back(std::move(op));
    progress();
  }

  /// Advances every operation as far as possible without waiting. MPI operations start in the order
  /// of submission.
  void progress() {
    bool may_start = true;
    for (const std::shared_ptr<Operation>& op : under_way_) {
      if (op->state == Operation::State::copying_out) {
        may_start = may_start && op->copied_out.done();
        if (!may_start) break;
        op->mpi = op->start();
        op->state = Operation::State::communicating;
      }
      if (op->state == Operation::State::communicating && op->mpi->test()) copy_in(*op);
      if (op->state == Operation::State::copying_in && op->copied_in.done())
        op->state = Operation::State::done;
    }
    while (!under_way_.empty() && under_way_.front()->state == Operation::State::done)
      under_way_.pop_front();
  }

 private:
  void copy_in(Operation& op) {
    op.mpi.reset();
    if (op.finish) op.finish();
    // The caller's earlier work may still use the memory of the result.
    if (op.caller) op.submitted.wait_on_stream(cuda_handle(*in_));
    op.copied_out.wait_on_stream(cuda_handle(*in_));
    copy_all(op.results, op.reach, *in_);
    op.copied_in.record(cuda_handle(*in_));
    op.state = Operation::State::copying_in;
  }

  Reach reach_;
  std::unique_ptr<Stream> out_, in_;
  std::deque<std::shared_ptr<Operation>> under_way_;
};

class OperationWork final : public Work {
 public:
  OperationWork(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> op,
                std::vector<int> peers)
      : engine_(std::move(engine)), op_(std::move(op)), peers_(std::move(peers)) {}

  bool test() override { return reaches(Operation::State::done); }

  /// Waits until the copies to the device are submitted; the device waits for the copies.
  void wait_on_stream() override {
    drive_to(Operation::State::copying_in);
    if (!op_->caller)
      drive_to(Operation::State::done);
    else if (op_->state != Operation::State::done)
      op_->copied_in.wait_on_stream(*op_->caller);
  }

  void wait() override {
    if (test()) return;
    wait_on_stream();
    drive_to(Operation::State::done);
  }

 private:
  bool reaches(Operation::State state) {
    if (op_->state < state) engine_->progress();
    return op_->state >= state;
  }
  void drive_to(Operation::State state) {
    if (reaches(state)) return;
    const WaitScope scope(op_->what, peers_);
    while (!reaches(state)) sched_yield();
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Operation> op_;
  std::vector<int> peers_;
};

}  // namespace gyre::staging
