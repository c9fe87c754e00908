#include "comm/communicator.hpp"

#include <algorithm>
#include <numeric>
#include <set>

#include "comm/local_work.hpp"
#include "core/error.hpp"
#include "runtime/mpi_env.hpp"

namespace gyre {
namespace {

class CompletedWork final : public Work {
 public:
  bool test() override { return true; }
  void wait() override {}
};

int64_t total(std::span<const int64_t> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

void require_all_ranks(const Communicator& comm, std::string_view what) {
  GYRE_CHECK(comm.size() == 1 || !LocalWork::under_way(),
             "{}: communication in work that each rank does alone", what);
}

}  // namespace

WorkPtr completed_work() {
  return std::make_unique<CompletedWork>();
}

void Communicator::count(int64_t bytes, int64_t messages) {
  traffic_.bytes_sent += bytes;
  traffic_.messages += messages;
}

Communicator& Communicator::subgroup(const std::vector<int>& ranks) {
  GYRE_CHECK(std::ranges::is_sorted(ranks) && std::ranges::binary_search(ranks, rank()),
             "rank {} requests a group without itself", rank());
  if (std::ssize(ranks) == size()) return *this;
  std::unique_ptr<Communicator>& group = subgroups_[ranks];
  if (group == nullptr) group = split(ranks.front());
  return *group;
}

int Communicator::ranks_of_run() const {
  return MpiEnvironment::world_size();
}

Traffic Communicator::traffic() const {
  Traffic sum = traffic_;
  for (const auto& [ranks, group] : subgroups_) {
    const Traffic more = group->traffic();
    sum.bytes_sent += more.bytes_sent;
    sum.messages += more.messages;
  }
  return sum;
}

WorkPtr Communicator::exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                               Stream& stream, std::string_view what) {
  require_all_ranks(*this, what);
  std::set<int> peers;
  for (const SendSlice& send : sends) {
    GYRE_CHECK(send.peer >= 0 && send.peer < size(), "{}: send to rank {} of {}", what, send.peer,
               size());
    if (send.peer == rank()) continue;
    count(std::ssize(send.data), peers.insert(send.peer).second ? 1 : 0);
  }
  for (const RecvSlice& recv : recvs)
    GYRE_CHECK(recv.peer >= 0 && recv.peer < size(), "{}: receive from rank {} of {}", what,
               recv.peer, size());
  return do_exchange(sends, recvs, stream, what);
}

void Communicator::check(const Collective& call, std::string_view what) const {
  using Kind = Collective::Kind;
  const auto sizes_match = [](std::span<const int64_t> blocks, std::span<const std::byte> buffer) {
    return total(blocks) == std::ssize(buffer);
  };
  const int me = rank();
  if (call.kind == Kind::all_gather) {
    GYRE_CHECK(
        std::ssize(call.recv_bytes) == size() && call.recv_bytes[me] == std::ssize(call.send),
        "{}: sizes do not match on rank {}", what, me);
    GYRE_CHECK(sizes_match(call.recv_bytes, call.recv), "{}: {} bytes for a buffer of {}", what,
               total(call.recv_bytes), call.recv.size());
  } else if (call.kind == Kind::all_to_all) {
    GYRE_CHECK(sizes_match(call.send_bytes, call.send) && sizes_match(call.recv_bytes, call.recv),
               "{}: block sizes do not add up to the buffers", what);
    GYRE_CHECK(call.send_bytes[me] == call.recv_bytes[me], "{}: own block has two sizes", what);
  } else if (call.kind == Kind::broadcast) {
    GYRE_CHECK(call.root >= 0 && call.root < size(), "{}: root {} of {} ranks", what, call.root,
               size());
  }
}

int64_t Communicator::bytes_sent_by(const Collective& call) const {
  const int64_t others = size() - 1;
  switch (call.kind) {
    case Collective::Kind::all_gather:
      return others * std::ssize(call.send);
    case Collective::Kind::all_to_all:
      return total(call.send_bytes) - call.send_bytes[rank()];
    case Collective::Kind::reduce_scatter:
      return others * std::ssize(call.recv);
    case Collective::Kind::all_reduce:
      return 2 * others * std::ssize(call.recv) / size();
    case Collective::Kind::broadcast:
      return rank() == call.root ? std::ssize(call.recv) : 0;
    case Collective::Kind::barrier:
      break;
  }
  return 0;
}

WorkPtr Communicator::collective(const Collective& call, Stream& stream, std::string_view what) {
  require_all_ranks(*this, what);
  check(call, what);
  const bool is_barrier = call.kind == Collective::Kind::barrier;
  if (size() == 1 && (call.in_place() || is_barrier)) return completed_work();
  count(bytes_sent_by(call), size() > 1 && !is_barrier ? 1 : 0);
  return do_collective(call, stream, what);
}

WorkPtr Communicator::all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                 Stream& stream, std::string_view what) {
  const std::vector<int64_t> bytes(size(), std::ssize(send));
  return all_gather_v(send, recv, bytes, stream, what);
}

WorkPtr Communicator::all_gather_v(std::span<const std::byte> send, std::span<std::byte> recv,
                                   std::span<const int64_t> recv_bytes, Stream& stream,
                                   std::string_view what) {
  return collective(
      {.kind = Collective::Kind::all_gather, .send = send, .recv = recv, .recv_bytes = recv_bytes},
      stream, what);
}

WorkPtr Communicator::all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                 Stream& stream, std::string_view what) {
  GYRE_CHECK(std::ssize(send) % size() == 0, "{}: {} bytes for {} ranks", what, send.size(),
             size());
  const std::vector<int64_t> bytes(size(), std::ssize(send) / size());
  return all_to_all_v(send, bytes, recv, bytes, stream, what);
}

WorkPtr Communicator::all_to_all_v(std::span<const std::byte> send,
                                   std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                                   std::span<const int64_t> recv_bytes, Stream& stream,
                                   std::string_view what) {
  return collective({.kind = Collective::Kind::all_to_all,
                     .send = send,
                     .recv = recv,
                     .send_bytes = send_bytes,
                     .recv_bytes = recv_bytes},
                    stream, what);
}

WorkPtr Communicator::reduce_scatter(const void* send, void* recv, int64_t count_, DType type,
                                     ReduceOp op, Stream& stream, std::string_view what) {
  const size_t block = count_ * size_of(type);
  return collective({.kind = Collective::Kind::reduce_scatter,
                     .send = {static_cast<const std::byte*>(send), block * size()},
                     .recv = {static_cast<std::byte*>(recv), block},
                     .type = type,
                     .op = op},
                    stream, what);
}

WorkPtr Communicator::all_reduce(void* data, int64_t count_, DType type, ReduceOp op,
                                 Stream& stream, std::string_view what) {
  const size_t bytes = count_ * size_of(type);
  return collective({.kind = Collective::Kind::all_reduce,
                     .recv = {static_cast<std::byte*>(data), bytes},
                     .type = type,
                     .op = op},
                    stream, what);
}

WorkPtr Communicator::broadcast(std::span<std::byte> data, int root, Stream& stream,
                                std::string_view what) {
  return collective({.kind = Collective::Kind::broadcast, .recv = data, .root = root}, stream,
                    what);
}

WorkPtr Communicator::barrier(Stream& stream, std::string_view what) {
  return collective({}, stream, what);
}

}  // namespace gyre
