#include "comm/communicator.hpp"

#include <algorithm>
#include <numeric>
#include <set>

#include "comm/local_work.hpp"
#include "core/error.hpp"

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

int64_t size_in_bytes(std::span<const std::byte> data) {
  return std::ssize(data);
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
    count(size_in_bytes(send.data), peers.insert(send.peer).second ? 1 : 0);
  }
  for (const RecvSlice& recv : recvs)
    GYRE_CHECK(recv.peer >= 0 && recv.peer < size(), "{}: receive from rank {} of {}", what,
               recv.peer, size());
  return do_exchange(sends, recvs, stream, what);
}

WorkPtr Communicator::all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                 Stream& stream, std::string_view what) {
  const std::vector<int64_t> bytes(size(), size_in_bytes(send));
  return all_gather_v(send, recv, bytes, stream, what);
}

WorkPtr Communicator::all_gather_v(std::span<const std::byte> send, std::span<std::byte> recv,
                                   std::span<const int64_t> recv_bytes, Stream& stream,
                                   std::string_view what) {
  require_all_ranks(*this, what);
  GYRE_CHECK(std::ssize(recv_bytes) == size() && recv_bytes[rank()] == size_in_bytes(send),
             "{}: sizes do not match on rank {}", what, rank());
  GYRE_CHECK(total(recv_bytes) == size_in_bytes(recv), "{}: {} bytes for a buffer of {}", what,
             total(recv_bytes), recv.size());
  count((size() - 1) * size_in_bytes(send), size() > 1 ? 1 : 0);
  return do_all_gather_v(send, recv, recv_bytes, stream, what);
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
  require_all_ranks(*this, what);
  GYRE_CHECK(total(send_bytes) == size_in_bytes(send) && total(recv_bytes) == size_in_bytes(recv),
             "{}: block sizes do not add up to the buffers", what);
  const size_t me = rank();
  GYRE_CHECK(send_bytes[me] == recv_bytes[me], "{}: own block has two sizes", what);
  count(total(send_bytes) - send_bytes[me], size() > 1 ? 1 : 0);
  return do_all_to_all_v(send, send_bytes, recv, recv_bytes, stream, what);
}

WorkPtr Communicator::reduce_scatter(const void* send, void* recv, int64_t count_, DType type,
                                     ReduceOp op, Stream& stream, std::string_view what) {
  require_all_ranks(*this, what);
  count((size() - 1) * count_ * static_cast<int64_t>(size_of(type)), size() > 1 ? 1 : 0);
  return do_reduce_scatter(send, recv, count_, type, op, stream, what);
}

WorkPtr Communicator::all_reduce(void* data, int64_t count_, DType type, ReduceOp op,
                                 Stream& stream, std::string_view what) {
  require_all_ranks(*this, what);
  if (size() == 1) return completed_work();
  count(2 * (size() - 1) * count_ * static_cast<int64_t>(size_of(type)) / size(), 1);
  return do_all_reduce(data, count_, type, op, stream, what);
}

WorkPtr Communicator::broadcast(std::span<std::byte> data, int root, Stream& stream,
                                std::string_view what) {
  require_all_ranks(*this, what);
  GYRE_CHECK(root >= 0 && root < size(), "{}: root {} of {} ranks", what, root, size());
  if (size() == 1) return completed_work();
  count(rank() == root ? size_in_bytes(data) : 0, 1);
  return do_broadcast(data, root, stream, what);
}

WorkPtr Communicator::barrier(Stream& stream, std::string_view what) {
  require_all_ranks(*this, what);
  if (size() == 1) return completed_work();
  return do_barrier(stream, what);
}

}  // namespace gyre
