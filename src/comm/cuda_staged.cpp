#include <numeric>
#include <utility>

#include "comm/agree.hpp"
#include "comm/coalesce.hpp"
#include "comm/cuda_staged_engine.hpp"
#include "comm/staged.hpp"
#include "core/error.hpp"
#include "runtime/mpi_env.hpp"

namespace gyre {
namespace {

using staging::copy_all;
using staging::Engine;
using staging::Operation;
using staging::Reach;

/// Slices of each peer except `rank`, in order; peers with 0 bytes are omitted.
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
  std::string_view backend() const override { return on_device() ? "mpi-gpu" : "staged"; }

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
    auto op = begin(stream, what);
    std::vector<SendSlice> mpi_sends;
    std::vector<RecvSlice> mpi_recvs;
    op->reach = engine_->reach();
    if (on_device()) {
      op->sent = Buffer<std::byte>(staging_bytes(sends, recvs, rank()), MemorySpace::device);
      CoalescedExchange exchange = coalesce(sends, recvs, rank(), op->sent.span(), what);
      copy_all(exchange.before, Reach::device, engine_->out());
      mpi_sends = std::move(exchange.sends);
      mpi_recvs = std::move(exchange.recvs);
      op->results = std::move(exchange.after);
    } else {
      copy_own(sends, recvs, what);
      const auto outgoing = by_peer(sends, rank(), size());
      const auto incoming = by_peer(recvs, rank(), size());
      op->sent = staging_for(outgoing);
      op->received = staging_for(incoming);
      mpi_sends = as_messages(outgoing, op->sent.data(), [&](std::byte* at, const SendSlice& s) {
        engine_->out().copy(at, s.data.data(), s.data.size());
      });
      mpi_recvs =
          as_messages(incoming, op->received.data(), [&](std::byte* at, const RecvSlice& r) {
            op->results.push_back({{at, r.data.size()}, r.data});
          });
    }
    std::vector<int> peers;
    for (const RecvSlice& message : mpi_recvs) peers.push_back(world_ranks_[index(message.peer)]);
    for (const SendSlice& message : mpi_sends) peers.push_back(world_ranks_[index(message.peer)]);
    op->start = [this, &op = *op, mpi_sends = std::move(mpi_sends),
                 mpi_recvs = std::move(mpi_recvs)] {
      return host_.exchange(mpi_sends, mpi_recvs, host_stream_, op.what);
    };
    return submit(std::move(op), std::move(peers));
  }

  WorkPtr do_all_gather_v(std::span<const std::byte> send, std::span<std::byte> recv,
                          std::span<const int64_t> recv_bytes, Stream& stream,
                          std::string_view what) override {
    auto op = begin(stream, what);
    stage(*op, send, recv, engine_->reach());
    op->start = [this, &op = *op, bytes = std::vector(recv_bytes.begin(), recv_bytes.end())] {
      return host_.all_gather_v(op.from, op.to, bytes, host_stream_, op.what);
    };
    return submit(std::move(op), world_ranks_);
  }

  WorkPtr do_all_to_all_v(std::span<const std::byte> send, std::span<const int64_t> send_bytes,
                          std::span<std::byte> recv, std::span<const int64_t> recv_bytes,
                          Stream& stream, std::string_view what) override {
    auto op = begin(stream, what);
    stage(*op, send, recv, engine_->reach());
    op->start = [this, &op = *op, out = std::vector(send_bytes.begin(), send_bytes.end()),
                 in = std::vector(recv_bytes.begin(), recv_bytes.end())] {
      return host_.all_to_all_v(op.from, out, op.to, in, host_stream_, op.what);
    };
    return submit(std::move(op), world_ranks_);
  }

  WorkPtr do_reduce_scatter(const void* send, void* recv, int64_t count, DType type, ReduceOp how,
                            Stream& stream, std::string_view what) override {
    auto op = begin(stream, what);
    const size_t block = static_cast<size_t>(count) * size_of(type);
    stage(*op, {static_cast<const std::byte*>(send), block * static_cast<size_t>(size())},
          {static_cast<std::byte*>(recv), block}, reach_to_reduce(type));
    if (type != DType::bf16) {
      op->start = [this, &op = *op, count, type, how] {
        return host_.reduce_scatter(op.from.data(), op.to.data(), count, type, how, host_stream_,
                                    op.what);
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
    stage_in_place(*op, {static_cast<std::byte*>(data), bytes}, true, reach_to_reduce(type));
    if (type != DType::bf16) {
      op->start = [this, &op = *op, count, type, how] {
        return host_.all_reduce(op.to.data(), count, type, how, host_stream_, op.what);
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
    stage_in_place(*op, data, rank() == root, engine_->reach());
    if (rank() == root) op->results.clear();
    op->start = [this, &op = *op, root] {
      return host_.broadcast(op.to, root, host_stream_, op.what);
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
    return std::make_unique<staging::OperationWork>(engine_, std::move(op), std::move(peers));
  }

  bool on_device() const { return engine_->reach() == Reach::device; }
  /// MPI has no bf16 reduction; it is done in f32 on the host.
  Reach reach_to_reduce(DType type) const {
    return type == DType::bf16 ? Reach::host : engine_->reach();
  }

  void stage(Operation& op, std::span<const std::byte> send, std::span<std::byte> recv,
             Reach reach) {
    op.reach = reach;
    if (reach == Reach::device) {
      op.from = send;
      op.to = recv;
      return;
    }
    op.sent = Buffer<std::byte>(std::ssize(send), MemorySpace::pinned);
    op.received = Buffer<std::byte>(std::ssize(recv), MemorySpace::pinned);
    engine_->out().copy(op.sent.data(), send.data(), send.size());
    op.results.push_back({op.received.span(), recv});
    op.from = op.sent.span();
    op.to = op.received.span();
  }
  void stage_in_place(Operation& op, std::span<std::byte> data, bool contributes, Reach reach) {
    op.reach = reach;
    if (reach == Reach::device) {
      op.to = data;
      return;
    }
    op.sent = Buffer<std::byte>(std::ssize(data), MemorySpace::pinned);
    if (contributes) engine_->out().copy(op.sent.data(), data.data(), data.size());
    op.results.push_back({op.sent.span(), data});
    op.to = op.sent.span();
  }

  /// Lays out one message per peer, contiguously from `at`; calls each(address, slice) per slice.
  template <class Slice, class Each>
  static std::vector<Slice> as_messages(
      const std::vector<std::pair<int, std::vector<Slice>>>& slices_of_peers, std::byte* at,
      Each each) {
    std::vector<Slice> messages;
    for (const auto& [peer, slices] : slices_of_peers) {
      messages.push_back({peer, {at, static_cast<size_t>(bytes_of_slices(slices))}});
      for (const Slice& slice : slices) {
        each(at, slice);
        at += slice.data.size();
      }
    }
    return messages;
  }

  /// Copies the messages of the rank to itself on the device.
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

  /// Widens all of `sent` into the last elements of `widened` [count].
  static void widen(Operation& op, int64_t count) {
    op.widened = Buffer<float>(count);
    const int64_t sent = op.sent.size() / static_cast<int64_t>(sizeof(bf16));
    const auto* from = reinterpret_cast<const bf16*>(op.sent.data());
    float* to = op.widened.data() + (count - sent);
    for (int64_t i = 0; i < sent; ++i) to[i] = to_float(from[i]);
  }
  /// Rounds the first `count` elements of `widened` to bf16.
  static void narrow(Operation& op, Buffer<std::byte>& result, int64_t count) {
    auto* to = reinterpret_cast<bf16*>(result.data());
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(op.widened[i]);
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
