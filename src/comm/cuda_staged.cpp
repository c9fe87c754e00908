#include <sched.h>

#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/agree.hpp"
#include "comm/coalesce.hpp"
#include "comm/staged.hpp"
#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_event.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/mpi_env.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// Memory in which MPI accesses the arrays of an operation.
enum class Reach {
  host,   ///< in pinned copies
  device  ///< in place; slices that are not contiguous are first gathered on the device
};

/// One operation in flight: device -> memory that MPI reads -> memory that MPI writes -> device.
struct Operation {
  enum class State { copying_out, communicating, copying_in, done };

  explicit Operation(std::string_view name) : what(name) {}

  std::string what;
  State state = State::copying_out;
  std::optional<cudaStream_t> caller;  ///< empty if submitted from the host
  /// Copies of the data: in pinned memory for Reach::host, else of slices in device memory.
  /// Exchanges and in-place collectives use only `sent`.
  Buffer<std::byte> sent, received;
  Reach reach = Reach::host;
  Collective call;  ///< for MPI, on memory that MPI reaches; unused for an exchange
  std::vector<int64_t> send_bytes, recv_bytes;  ///< by rank, if `call` has blocks of several sizes
  Buffer<float> widened;                        ///< f32 copy of bf16 data: MPI does not reduce bf16
  std::function<WorkPtr()> start;               ///< starts the MPI operation
  std::function<void()> finish;   ///< runs on the host between MPI and the copies to the device
  std::vector<SpanCopy> results;  ///< copies to the device, or within it
  WorkPtr mpi;
  CudaEvent submitted;   ///< after earlier work on the caller's stream
  CudaEvent copied_out;  ///< after the copies into memory that MPI reads
  CudaEvent copied_in;

  /// The pinned copy of the result.
  Buffer<std::byte>& result() { return call.in_place() ? sent : received; }
};

/// Submits copies: those within the device by one kernel, others by one call each.
void copy_all(std::span<const SpanCopy> copies, Reach reach, Stream& stream) {
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

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(Communicator& host, std::shared_ptr<Engine> engine, std::vector<int> ranks)
      : host_(host), engine_(std::move(engine)), world_ranks_(std::move(ranks)) {}
  StagedCommunicator(std::unique_ptr<Communicator> owned, std::shared_ptr<Engine> engine,
                     std::vector<int> ranks)
      : owned_(std::move(owned)),
        host_(*owned_),
        engine_(std::move(engine)),
        world_ranks_(std::move(ranks)) {}

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  MemorySpace space() const override { return MemorySpace::device; }
  std::string_view backend() const override { return on_device() ? "mpi-gpu" : "staged"; }

  std::unique_ptr<Communicator> split(int color) override {
    std::unique_ptr<Communicator> part = host_.split(color);
    std::vector<int> ranks;
    for (const int64_t r : all_gather_value(*part, int64_t{world_ranks_[rank()]}))
      ranks.push_back(static_cast<int>(r));
    return std::make_unique<StagedCommunicator>(std::move(part), engine_, std::move(ranks));
  }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                      Stream& stream, std::string_view what) override {
    auto op = begin(stream, what);
    op->reach = engine_->reach();
    const Staged staged = on_device() ? Staged::scattered : Staged::all;
    op->sent = Buffer<std::byte>(staging_bytes(sends, recvs, rank(), staged),
                                 on_device() ? MemorySpace::device : MemorySpace::pinned);
    CoalescedExchange exchange = coalesce(sends, recvs, rank(), op->sent.span(), what, staged);
    copy_all(exchange.before, op->reach, engine_->out());
    op->results = std::move(exchange.after);
    std::vector<int> peers;
    for (const RecvSlice& message : exchange.recvs) peers.push_back(world_ranks_[message.peer]);
    for (const SendSlice& message : exchange.sends) peers.push_back(world_ranks_[message.peer]);
    op->start = [this, &op = *op, mpi_sends = std::move(exchange.sends),
                 mpi_recvs = std::move(exchange.recvs)] {
      return host_.exchange(mpi_sends, mpi_recvs, host_stream_, op.what);
    };
    return submit(std::move(op), std::move(peers));
  }

  WorkPtr do_collective(const Collective& call, Stream& stream, std::string_view what) override {
    auto op = begin(stream, what);
    const bool is_reduction =
        call.kind == Collective::Kind::reduce_scatter || call.kind == Collective::Kind::all_reduce;
    const bool widens = is_reduction && call.type == DType::bf16;  // MPI reduces no bf16
    stage(*op, call, widens ? Reach::host : engine_->reach());
    op->start = [this, &op = *op, widens] {
      if (widens) widen(op);
      return host_.collective(op.call, host_stream_, op.what);
    };
    if (widens) op->finish = [&op = *op] { narrow(op); };
    return submit(std::move(op), world_ranks_);
  }

 private:
  std::shared_ptr<Operation> begin(Stream& stream, std::string_view what) {
    auto op = std::make_shared<Operation>(what);
    engine_->begin(*op, stream);
    return op;
  }
  WorkPtr submit(std::shared_ptr<Operation> op, std::vector<int> peers) {
    engine_->submit(op);
    return std::make_unique<OperationWork>(engine_, std::move(op), std::move(peers));
  }

  bool on_device() const { return engine_->reach() == Reach::device; }

  /// Sets `op.call`, the collective in memory that MPI reaches, and the copies out and in.
  void stage(Operation& op, const Collective& call, Reach reach) {
    if (call.kind == Collective::Kind::barrier) return;
    op.reach = reach;
    op.call = call;
    op.send_bytes.assign(call.send_bytes.begin(), call.send_bytes.end());
    op.recv_bytes.assign(call.recv_bytes.begin(), call.recv_bytes.end());
    op.call.send_bytes = op.send_bytes;
    op.call.recv_bytes = op.recv_bytes;
    if (reach == Reach::device) return;
    const bool gives = call.kind != Collective::Kind::broadcast || rank() == call.root;
    const bool takes = call.kind != Collective::Kind::broadcast || rank() != call.root;
    const std::span<const std::byte> send = call.in_place() ? call.recv : call.send;
    op.sent = Buffer<std::byte>(std::ssize(send), MemorySpace::pinned);
    if (!call.in_place())
      op.received = Buffer<std::byte>(std::ssize(call.recv), MemorySpace::pinned);
    if (gives) engine_->out().copy(op.sent.data(), send.data(), send.size());
    op.call.send = op.sent.span();
    op.call.recv = op.result().span();
    if (takes) op.results.push_back({op.result().span(), call.recv});
  }

  /// Turns a reduction of bf16 into one of f32. `widened` holds the result, then the widened input;
  /// in place these are the same.
  static void widen(Operation& op) {
    const int64_t sent = op.sent.size() / static_cast<int64_t>(sizeof(bf16));
    const int64_t count = op.call.count();
    op.widened = Buffer<float>(op.call.in_place() ? count : count + sent);
    const auto* from = reinterpret_cast<const bf16*>(op.sent.data());
    const std::span<float> all = op.widened.span(), to = all.last(sent);
    for (int64_t i = 0; i < sent; ++i) to[i] = to_float(from[i]);
    op.call.type = DType::f32;
    op.call.send = std::as_bytes(to);
    op.call.recv = std::as_writable_bytes(all.first(count));
  }
  /// Rounds the result to bf16.
  static void narrow(Operation& op) {
    auto* to = reinterpret_cast<bf16*>(op.result().data());
    for (int64_t i = 0; i < op.call.count(); ++i) to[i] = to_bf16(op.widened[i]);
  }

  std::unique_ptr<Communicator> owned_;  ///< null for the first communicator
  Communicator& host_;
  std::shared_ptr<Engine> engine_;
  std::vector<int> world_ranks_;  ///< the members' ranks in the world, for the watchdog's report
  HostStream host_stream_;
};

std::shared_ptr<Engine> make_engine(Communicator& host, Reach reach) {
  std::shared_ptr<Engine> engine;
  run_agreed(host, "preparing the GPU", [&] { engine = std::make_shared<Engine>(reach); });
  return engine;
}
std::vector<int> all_ranks(const Communicator& host) {
  std::vector<int> ranks(host.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(Communicator& host) {
  return std::make_unique<StagedCommunicator>(host, make_engine(host, Reach::host),
                                              all_ranks(host));
}

std::unique_ptr<Communicator> make_gpu_aware_communicator(std::unique_ptr<Communicator> mpi) {
  run_agreed(*mpi, "GPU-aware MPI", [] {
    if (!mpi_takes_gpu_memory())
      throw_runtime(
          "{} says that it takes no GPU memory; one that is built for CUDA does (Open MPI and "
          "MPICH: --with-cuda; HPE Cray MPI: also MPICH_GPU_SUPPORT_ENABLED=1), and staged "
          "communication needs none",
          MpiEnvironment::library_version());
  });
  auto engine = make_engine(*mpi, Reach::device);
  auto ranks = all_ranks(*mpi);
  return std::make_unique<StagedCommunicator>(std::move(mpi), std::move(engine), std::move(ranks));
}

}  // namespace gyre
