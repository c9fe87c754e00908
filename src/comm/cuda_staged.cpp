#include <sched.h>

#include <deque>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "comm/agree.hpp"
#include "comm/coalesce.hpp"
#include "comm/staged.hpp"
#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_event.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// One operation on its way: device -> `sent`, MPI, `received` -> device.
struct Operation {
  enum class State { copying_out, communicating, copying_in, done };

  explicit Operation(std::string_view name) : what(name) {}

  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
  std::string what;
  State state = State::copying_out;
  std::optional<cudaStream_t> caller;  ///< none when it was submitted from the host
  Buffer<std::byte> sent, received;    ///< pinned; a reduction in place has `sent` alone
  Buffer<float> widened;               ///< MPI does not reduce bf16
  std::function<WorkPtr()> start;      ///< the MPI operation
  std::function<void()> finish;        ///< on the host, between MPI and the copies to the device
  std::vector<Copy> results;
  WorkPtr mpi;
  CudaEvent submitted;   ///< what was on the caller's stream before
  CudaEvent copied_out;  ///< `sent` is complete
  CudaEvent copied_in;
};

/// What all communicators that are split from one share: the copy streams, and the operations under
/// way in the order of their submission.
class Engine {
 public:
  /// Two streams, as a device copies in both directions at once.
  Engine() : out_(make_cuda_stream()), in_(make_cuda_stream()) {}

  Stream& out() { return *out_; }

  /// Behind the work already on `stream`, what follows on out() is done.
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

  /// Takes every operation as far as it goes without waiting. MPI operations start in the order of
  /// submission: the next one only when all before it have.
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
    // What the device still does to the result's memory may have been submitted before.
    if (op.caller) op.submitted.wait_on_stream(cuda_handle(*in_));
    op.copied_out.wait_on_stream(cuda_handle(*in_));
    for (const Operation::Copy& copy : op.results) in_->copy(copy.to, copy.from, copy.bytes);
    op.copied_in.record(cuda_handle(*in_));
    op.state = Operation::State::copying_in;
  }

  std::unique_ptr<Stream> out_, in_;
  std::deque<std::shared_ptr<Operation>> under_way_;
};

class StagedWork final : public Work {
 public:
  StagedWork(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> op, std::vector<int> peers)
      : engine_(std::move(engine)), op_(std::move(op)), peers_(std::move(peers)) {}

  bool test() override { return reaches(Operation::State::done); }

  /// Waits until the copies to the device are submitted; the device waits for those.
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

/// The slices of each peer but `rank`, in their order; a peer without a byte is left out.
template <class Slice>
std::vector<std::pair<int, std::vector<Slice>>> by_peer(std::span<const Slice> slices, int rank,
                                                        int size) {
  std::vector<std::pair<int, std::vector<Slice>>> result;
  for (int peer = 0; peer < size; ++peer) {
    std::vector<Slice> mine;
    for (const Slice& slice : slices)
      if (slice.peer == peer && peer != rank && !slice.data.empty()) mine.push_back(slice);
    if (!mine.empty()) result.emplace_back(peer, std::move(mine));
  }
  return result;
}

template <class Slice>
int64_t bytes_of_slices(const std::vector<Slice>& slices) {
  int64_t bytes = 0;
  for (const Slice& slice : slices) bytes += std::ssize(slice.data);
  return bytes;
}

template <class Slice>
Buffer<std::byte> staging_for(const std::vector<std::pair<int, std::vector<Slice>>>& messages) {
  int64_t bytes = 0;
  for (const auto& [peer, slices] : messages) bytes += bytes_of_slices(slices);
  return Buffer<std::byte>(bytes, MemorySpace::pinned);
}

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
  std::string_view backend() const override { return "staged"; }

  std::unique_ptr<Communicator> split(int color) override {
    std::unique_ptr<Communicator> part = host_.split(color);
    std::vector<int> ranks;
    for (const int64_t r : all_gather_value(*part, int64_t{world_ranks_[index(rank())]}))
      ranks.push_back(static_cast<int>(r));
    return std::make_unique<StagedCommunicator>(std::move(part), engine_, std::move(ranks));
  }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                      Stream& stream, std::string_view what) override {
    const auto outgoing = by_peer(sends, rank(), size());
    const auto incoming = by_peer(recvs, rank(), size());
    auto op = begin(stream, what);
    copy_own(sends, recvs, what);
    std::vector<SendSlice> host_sends;
    std::vector<RecvSlice> host_recvs;
    op->sent = staging_for(outgoing);
    op->received = staging_for(incoming);
    std::byte* at = op->sent.data();
    for (const auto& [peer, slices] : outgoing) {
      host_sends.push_back({peer, {at, static_cast<size_t>(bytes_of_slices(slices))}});
      for (const SendSlice& slice : slices) {
        engine_->out().copy(at, slice.data.data(), slice.data.size());
        at += slice.data.size();
      }
    }
    at = op->received.data();
    for (const auto& [peer, slices] : incoming) {
      host_recvs.push_back({peer, {at, static_cast<size_t>(bytes_of_slices(slices))}});
      for (const RecvSlice& slice : slices) {
        op->results.push_back({slice.data.data(), at, slice.data.size()});
        at += slice.data.size();
      }
    }
    op->start = [this, &op = *op, host_sends = std::move(host_sends),
                 host_recvs = std::move(host_recvs)] {
      return host_.exchange(host_sends, host_recvs, host_stream_, op.what);
    };
    std::vector<int> peers;
    for (const auto& message : incoming) peers.push_back(world_ranks_[index(message.first)]);
    for (const auto& message : outgoing) peers.push_back(world_ranks_[index(message.first)]);
    return submit(std::move(op), std::move(peers));
  }

  WorkPtr do_all_gather_v(std::span<const std::byte> send, std::span<std::byte> recv,
                          std::span<const int64_t> recv_bytes, Stream& stream,
                          std::string_view what) override {
    auto op = begin(stream, what);
    stage(*op, send, recv);
    op->start = [this, &op = *op, bytes = std::vector(recv_bytes.begin(), recv_bytes.end())] {
      return host_.all_gather_v(op.sent.span(), op.received.span(), bytes, host_stream_, op.what);
    };
    return submit(std::move(op), world_ranks_);
  }

  WorkPtr do_all_to_all_v(std::span<const std::byte> send, std::span<const int64_t> send_bytes,
                          std::span<std::byte> recv, std::span<const int64_t> recv_bytes,
                          Stream& stream, std::string_view what) override {
    auto op = begin(stream, what);
    stage(*op, send, recv);
    op->start = [this, &op = *op, out = std::vector(send_bytes.begin(), send_bytes.end()),
                 in = std::vector(recv_bytes.begin(), recv_bytes.end())] {
      return host_.all_to_all_v(op.sent.span(), out, op.received.span(), in, host_stream_, op.what);
    };
    return submit(std::move(op), world_ranks_);
  }

  WorkPtr do_reduce_scatter(const void* send, void* recv, int64_t count, DType type, ReduceOp how,
                            Stream& stream, std::string_view what) override {
    auto op = begin(stream, what);
    const size_t block = static_cast<size_t>(count) * size_of(type);
    stage(*op, {static_cast<const std::byte*>(send), block * static_cast<size_t>(size())},
          {static_cast<std::byte*>(recv), block});
    if (type != DType::bf16) {
      op->start = [this, &op = *op, count, type, how] {
        return host_.reduce_scatter(op.sent.data(), op.received.data(), count, type, how,
                                    host_stream_, op.what);
      };
      return submit(std::move(op), world_ranks_);
    }
    op->start = [this, &op = *op, count, how] {
      widen(op, count * (size() + 1));
      return host_.reduce_scatter(op.widened.data() + count, op.widened.data(), count, DType::f32,
                                  how, host_stream_, op.what);
    };
    op->finish = [&op = *op, count] { narrow(op, op.received, count); };
    return submit(std::move(op), world_ranks_);
  }

  WorkPtr do_all_reduce(void* data, int64_t count, DType type, ReduceOp how, Stream& stream,
                        std::string_view what) override {
    auto op = begin(stream, what);
    const size_t bytes = static_cast<size_t>(count) * size_of(type);
    stage_in_place(*op, {static_cast<std::byte*>(data), bytes}, true);
    if (type != DType::bf16) {
      op->start = [this, &op = *op, count, type, how] {
        return host_.all_reduce(op.sent.data(), count, type, how, host_stream_, op.what);
      };
      return submit(std::move(op), world_ranks_);
    }
    op->start = [this, &op = *op, count, how] {
      widen(op, count);
      return host_.all_reduce(op.widened.data(), count, DType::f32, how, host_stream_, op.what);
    };
    op->finish = [&op = *op, count] { narrow(op, op.sent, count); };
    return submit(std::move(op), world_ranks_);
  }

  WorkPtr do_broadcast(std::span<std::byte> data, int root, Stream& stream,
                       std::string_view what) override {
    auto op = begin(stream, what);
    stage_in_place(*op, data, rank() == root);
    if (rank() == root) op->results.clear();
    op->start = [this, &op = *op, root] {
      return host_.broadcast(op.sent.span(), root, host_stream_, op.what);
    };
    return submit(std::move(op), world_ranks_);
  }

  WorkPtr do_barrier(Stream& stream, std::string_view what) override {
    auto op = begin(stream, what);
    op->start = [this, &op = *op] { return host_.barrier(host_stream_, op.what); };
    return submit(std::move(op), world_ranks_);
  }

 private:
  static size_t index(int r) { return static_cast<size_t>(r); }

  std::shared_ptr<Operation> begin(Stream& stream, std::string_view what) {
    auto op = std::make_shared<Operation>(what);
    engine_->begin(*op, stream);
    return op;
  }
  WorkPtr submit(std::shared_ptr<Operation> op, std::vector<int> peers) {
    engine_->submit(op);
    return std::make_unique<StagedWork>(engine_, std::move(op), std::move(peers));
  }

  void stage(Operation& op, std::span<const std::byte> send, std::span<std::byte> recv) {
    op.sent = Buffer<std::byte>(std::ssize(send), MemorySpace::pinned);
    op.received = Buffer<std::byte>(std::ssize(recv), MemorySpace::pinned);
    engine_->out().copy(op.sent.data(), send.data(), send.size());
    op.results.push_back({recv.data(), op.received.data(), recv.size()});
  }
  void stage_in_place(Operation& op, std::span<std::byte> data, bool contributes) {
    op.sent = Buffer<std::byte>(std::ssize(data), MemorySpace::pinned);
    if (contributes) engine_->out().copy(op.sent.data(), data.data(), data.size());
    op.results.push_back({data.data(), op.sent.data(), data.size()});
  }

  /// What the rank sends itself stays on the device.
  void copy_own(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                std::string_view what) {
    const auto own = [this](const auto& slices) {
      auto kept = std::vector(slices.begin(), slices.end());
      std::erase_if(kept, [this](const auto& slice) { return slice.peer != rank(); });
      return kept;
    };
    for (const auto& copy : coalesce(own(sends), own(recvs), rank(), {}, what).after)
      engine_->out().copy(copy.to.data(), copy.from.data(), copy.to.size());
  }

  /// `sent`, the whole of it, as the last elements of `widened` [count].
  static void widen(Operation& op, int64_t count) {
    op.widened = Buffer<float>(count);
    const int64_t sent = op.sent.size() / static_cast<int64_t>(sizeof(bf16));
    const auto* from = reinterpret_cast<const bf16*>(op.sent.data());
    float* to = op.widened.data() + (count - sent);
    for (int64_t i = 0; i < sent; ++i) to[i] = to_float(from[i]);
  }
  /// The first `count` elements of `widened`, rounded once.
  static void narrow(Operation& op, Buffer<std::byte>& result, int64_t count) {
    auto* to = reinterpret_cast<bf16*>(result.data());
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(op.widened[i]);
  }

  std::unique_ptr<Communicator> owned_;  ///< none for the first of all
  Communicator& host_;
  std::shared_ptr<Engine> engine_;
  std::vector<int> world_ranks_;  ///< of the members, by which the watchdog names them
  HostStream host_stream_;
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(Communicator& host) {
  std::shared_ptr<Engine> engine;
  run_agreed(host, "preparing the GPU", [&] { engine = std::make_shared<Engine>(); });
  std::vector<int> ranks(static_cast<size_t>(host.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_unique<StagedCommunicator>(host, std::move(engine), std::move(ranks));
}

}  // namespace gyre
