#include "comm/nccl.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>

#include "comm/agree.hpp"
#include "comm/coalesce.hpp"
#include "comm/cuda_device.hpp"
#include "comm/nccl_channel.hpp"
#include "comm/nccl_version.hpp"
#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_event.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/host.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

ncclDataType_t nccl_type(DType type) {
  switch (type) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f64:
      return ncclFloat64;
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
  }
  throw_runtime("NCCL has no type for {}", name_of(type));
}

ncclRedOp_t nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return ncclSum;
    case ReduceOp::max:
      return ncclMax;
    case ReduceOp::min:
      return ncclMin;
  }
  throw_runtime("NCCL has no reduction number {}", static_cast<int>(op));
}

bool is_idle(cudaStream_t stream) {
  const cudaError_t state = cudaStreamQuery(stream);
  if (state != cudaErrorNotReady) check_cuda(state, "cudaStreamQuery", __FILE__, __LINE__);
  (void)cudaGetLastError();
  return state == cudaSuccess;
}

class NcclWork final : public Work {
 public:
  /// `recorded`: whether the caller's stream recorded the operation.
  NcclWork(std::shared_ptr<Channel> channel, std::optional<cudaStream_t> caller, bool recorded,
           std::string_view what, std::vector<int> peers)
      : channel_(std::move(channel)),
        caller_(caller),
        recorded_(recorded),
        what_(recorded ? fmt::format("{} (CUDA graph)", what) : std::string(what)),
        peers_(std::move(peers)) {
    done_.record(channel_->stream());
  }

  bool test() override {
    if (complete_) return true;
    channel_->check_progress(what_);
    if (recorded_) return is_idle(*caller_);
    complete_ = done_.done();
    return complete_;
  }

  void wait_on_stream() override {
    if (!caller_) return wait();  // host callers have no stream to order
    if (!complete_) done_.wait_on_stream(*caller_);
  }

  void wait() override {
    if (test()) return;
    const WaitScope scope(what_, peers_);
    while (!test()) sched_yield();
  }

 private:
  std::shared_ptr<Channel> channel_;
  std::optional<cudaStream_t> caller_;  ///< empty if submitted from the host
  bool recorded_;
  std::string what_;
  std::vector<int> peers_;
  CudaEvent done_;
  bool complete_ = false;
};

/// Sets the world ranks of the members of a new channel; `mine` is that of this rank. Collective.
void learn_world_ranks(Channel& channel, int mine) {
  Buffer<int32_t> ranks(channel.size, MemorySpace::device);
  channel.world_ranks.resize(channel.size);
  int32_t* own = ranks.data() + channel.rank;
  const cudaStream_t stream = channel.stream();
  GYRE_CHECK_CUDA(cudaMemcpyAsync(own, &mine, sizeof(mine), cudaMemcpyHostToDevice, stream));
  GYRE_CHECK_NCCL(channel, ncclAllGather(own, ranks.data(), 1, ncclInt32, channel.comm, stream));
  GYRE_CHECK_CUDA(cudaMemcpyAsync(channel.world_ranks.data(), ranks.data(),
                                  channel.world_ranks.size() * sizeof(int32_t),
                                  cudaMemcpyDeviceToHost, stream));
  GYRE_CHECK_CUDA(cudaStreamSynchronize(stream));
}

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}

  int rank() const override { return channel_->rank; }
  int size() const override { return channel_->size; }
  MemorySpace space() const override { return MemorySpace::device; }
  std::string_view backend() const override { return "nccl"; }
  bool can_record() const override { return true; }
  std::shared_ptr<void> register_window(std::span<std::byte> memory) override {
    GYRE_CHECK_CUDA(cudaDeviceSynchronize());  // waits for earlier users of the memory of `least`
    Buffer<int64_t> least(1, MemorySpace::device);
    return register_nccl_window(channel_, memory, [&](int64_t own) {
      const cudaStream_t stream = channel_->stream();
      const auto copy = [&](void* to, const void* from) {
        GYRE_CHECK_CUDA(cudaMemcpyAsync(to, from, sizeof(own), cudaMemcpyDefault, stream));
      };
      HostStream host;
      copy(least.data(), &own);
      do_collective({.kind = Collective::Kind::all_reduce,
                     .recv = std::as_writable_bytes(least.span()),
                     .type = DType::i64,
                     .op = ReduceOp::min},
                    host, "a window")
          ->wait();
      copy(&own, least.data());
      GYRE_CHECK_CUDA(cudaStreamSynchronize(stream));
      return own;
    });
  }

  std::unique_ptr<Communicator> split(int color) override {
    GYRE_CHECK(color >= 0, "color {} of rank {}", color, rank());
    const WaitScope scope("splitting a communicator", channel_->world_ranks);
    channel_->require_usable("split");
    // ncclCommSplit requires that no operation is in flight.
    GYRE_CHECK_CUDA(cudaStreamSynchronize(channel_->stream()));
    auto part = std::make_shared<Channel>(channel_->comm_stream);
    GYRE_CHECK_NCCL(*channel_, ncclCommSplit(channel_->comm, color, rank(), &part->comm, nullptr));
    part->check(ncclInProgress, "ncclCommSplit", __FILE__, __LINE__);  // waits for the new part
    GYRE_CHECK_NCCL(*part, ncclCommUserRank(part->comm, &part->rank));
    GYRE_CHECK_NCCL(*part, ncclCommCount(part->comm, &part->size));
    learn_world_ranks(*part, channel_->world_ranks[channel_->index()]);
    return std::make_unique<NcclCommunicator>(std::move(part));
  }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                      Stream& stream, std::string_view what) override {
    std::vector<int> peers;
    for (const RecvSlice& recv : recvs) peers.push_back(world_rank(recv.peer));
    for (const SendSlice& send : sends) peers.push_back(world_rank(send.peer));
    return submit(stream, what, std::move(peers), [&] { exchange_slices(sends, recvs, what); });
  }

  WorkPtr do_collective(const Collective& call, Stream& stream, std::string_view what) override {
    return submit(stream, what, channel_->world_ranks, [&] { issue(call, what); });
  }

 private:
  int world_rank(int peer) const { return channel_->world_ranks[peer]; }

  /// Runs `issue`, which submits an operation to the communication stream, after the work already
  /// on `stream`.
  template <class Issue>
  WorkPtr submit(Stream& stream, std::string_view what, std::vector<int> peers, Issue issue) {
    const WaitScope scope(what, peers);  // the first with a peer waits to connect
    channel_->require_usable(what);
    std::optional<cudaStream_t> caller;
    if (stream.space() == MemorySpace::device) {
      caller = cuda_handle(stream);
      CudaEvent submitted;
      submitted.record(*caller);
      submitted.wait_on_stream(channel_->stream());
    }
    issue();
    return std::make_unique<NcclWork>(channel_, caller, stream.recording(), what, std::move(peers));
  }

  void issue(const Collective& call, std::string_view what) {
    const ncclComm_t comm = channel_->comm;
    const cudaStream_t stream = channel_->stream();
    const std::span<const std::byte> send = call.send;
    const std::span<std::byte> recv = call.recv;
    using Kind = Collective::Kind;
    switch (call.kind) {
      case Kind::all_gather:
        if (std::ranges::count(call.recv_bytes, call.recv_bytes[0]) == size()) {
          GYRE_CHECK_NCCL(*channel_, ncclAllGather(send.data(), recv.data(), send.size(), ncclUint8,
                                                   comm, stream));
        } else {
          std::vector<SendSlice> sends;
          for (int peer = 0; peer < size(); ++peer) sends.push_back({peer, send});
          exchange_slices(sends, blocks_of<RecvSlice>(recv, call.recv_bytes), what);
        }
        break;
      case Kind::all_to_all:
        exchange_slices(blocks_of<SendSlice>(send, call.send_bytes),
                        blocks_of<RecvSlice>(recv, call.recv_bytes), what);
        break;
      case Kind::reduce_scatter:
        GYRE_CHECK_NCCL(*channel_, ncclReduceScatter(
                                       send.data(), recv.data(), static_cast<size_t>(call.count()),
                                       nccl_type(call.type), nccl_op(call.op), comm, stream));
        break;
      case Kind::all_reduce:
        GYRE_CHECK_NCCL(*channel_,
                        ncclAllReduce(recv.data(), recv.data(), static_cast<size_t>(call.count()),
                                      nccl_type(call.type), nccl_op(call.op), comm, stream));
        break;
      case Kind::broadcast:
        GYRE_CHECK_NCCL(*channel_, ncclBroadcast(recv.data(), recv.data(), recv.size(), ncclUint8,
                                                 call.root, comm, stream));
        break;
      case Kind::barrier: {
        // NCCL has no barrier. A reduction completes only after every rank has contributed.
        int32_t* const flag = channel_->flag.data();
        GYRE_CHECK_NCCL(*channel_, ncclAllReduce(flag, flag, 1, ncclInt32, ncclMax, comm, stream));
        break;
      }
    }
  }

  /// Messages to other ranks form one NCCL group, one message per peer, because NCCL's sends and
  /// receives must match in length. Messages to this rank are copies on the device.
  void exchange_slices(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                       std::string_view what) {
    const std::span<std::byte> staging =
        channel_->comm_stream->staging(staging_bytes(sends, recvs, rank()));
    const CoalescedExchange exchange = coalesce(sends, recvs, rank(), staging, what);
    cuda_copy_spans(exchange.before, channel_->stream());
    Group group(*channel_);
    for (const SendSlice& send : exchange.sends) group.send(send.data, send.peer);
    for (const RecvSlice& recv : exchange.recvs) group.recv(recv.data, recv.peer);
    group.end();
    cuda_copy_spans(exchange.after, channel_->stream());
  }

  /// One slice per rank of data that is packed in rank order.
  template <class Slice, class Byte>
  static std::vector<Slice> blocks_of(std::span<Byte> data, std::span<const int64_t> bytes) {
    std::vector<Slice> blocks;
    for (const int64_t size : bytes) {
      blocks.push_back({static_cast<int>(blocks.size()), data.first(size)});
      data = data.subspan(size);
    }
    return blocks;
  }

  std::shared_ptr<Channel> channel_;
};

void require_devices(Communicator& host) {
  const std::vector<RankDevice> devices = devices_of_ranks(host, [](int) {
    int device = 0;
    GYRE_CHECK_CUDA(cudaGetDevice(&device));
    return device;
  });
  run_agreed(host, "preparing the GPU", [&] {
    const RankDevice& mine = devices[host.rank()];
    const auto first =
        std::ranges::find_if(devices, [&](const auto& other) { return same_device(other, mine); });
    if (first->rank == host.rank() || nccl_shares_gpus()) return;
    throw_runtime(
        "ranks {} and {} on host {} have one CUDA device; NCCL takes several ranks on one from "
        "version 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment, and staged "
        "communication always does",
        first->rank, host.rank(), host_name());
  });
}

/// Throws if the loaded library is too old; it may be older than the one of the build.
void require_library(Communicator& host) {
  run_agreed(host, "loading NCCL", [] {
    int version = 0;
    if (ncclGetVersion(&version) == ncclSuccess && version < NCCL_VERSION(2, 18, 0))
      throw_runtime("NCCL {} on host {} is too old: 2.18 or later is needed", nccl_version(),
                    host_name());
  });
}

ncclUniqueId share_unique_id(Communicator& host) {
  ncclUniqueId id{};
  run_agreed(host, "ncclGetUniqueId", [&] {
    if (host.rank() != 0) return;
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess)
      throw_runtime("ncclGetUniqueId failed on host {}: {}; NCCL's last error: {}", host_name(),
                    ncclGetErrorString(result), ncclGetLastError(nullptr));
  });
  HostStream stream;
  host.broadcast(std::as_writable_bytes(std::span(&id, 1)), 0, stream, "NCCL unique id")->wait();
  host.barrier(stream, "NCCL unique id")->wait();
  return id;
}

/// On one H200 (NCCL 2.30.7), recorded operations with registered buffers never ended for 4 ranks
/// and took twice the time for 2. NCCL reads the variable when it records its first operation.
void leave_recorded_buffers_unregistered() {
  setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
}

}  // namespace

bool nccl_shares_gpus() {
  int version = 0;
  const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return ncclGetVersion(&version) == ncclSuccess && version >= NCCL_VERSION(2, 30, 0) &&
         enabled != nullptr && std::string_view(enabled) == "1";
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host) {
  leave_recorded_buffers_unregistered();
  require_library(host);
  require_devices(host);
  std::shared_ptr<Channel> channel;
  run_agreed(host, "preparing the GPU",
             [&] { channel = std::make_shared<Channel>(std::make_shared<CommStream>()); });
  channel->rank = host.rank();
  channel->size = host.size();
  for (int r = 0; r < host.size(); ++r) channel->world_ranks.push_back(r);
  const ncclUniqueId id = share_unique_id(host);
  const WaitScope scope("ncclCommInitRank");
  GYRE_CHECK_NCCL(*channel, ncclCommInitRank(&channel->comm, host.size(), id, host.rank()));
  return std::make_unique<NcclCommunicator>(std::move(channel));
}

}  // namespace gyre
