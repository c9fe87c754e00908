#include "comm/checked.hpp"

#include <cstring>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "core/checksum.hpp"
#include "core/error.hpp"

namespace gyre {
namespace {

using Bytes = std::span<const std::byte>;

/// Checksum of each peer's message; slices to one peer are one message.
template <class Slice>
std::map<int, uint64_t> checksums_of(const std::vector<Slice>& slices) {
  std::map<int, Checksum> sums;
  for (const Slice& slice : slices) sums[slice.peer].add(slice.data);
  std::map<int, uint64_t> values;
  for (const auto& [peer, sum] : sums) values[peer] = sum.value();
  return values;
}

/// Checksums of the blocks of `data`, which are packed in rank order.
std::vector<uint64_t> checksums_of(Bytes data, std::span<const int64_t> bytes) {
  std::vector<uint64_t> sums;
  size_t begin = 0;
  for (const int64_t size : bytes) {
    sums.push_back(checksum_of(data.subspan(begin, size)));
    begin += size;
  }
  return sums;
}

template <class T>
Bytes read(const std::vector<T>& values) {
  return bytes_of(std::span<const T>(values));
}
template <class T>
std::span<std::byte> write(std::vector<T>& values) {
  return writable_bytes_of(std::span<T>(values));
}

[[noreturn]] void fail(const std::string& what, const std::string& whose) {
  throw_runtime("{}: {} arrived with other bits than were sent: memory or network are at fault",
                what, whose);
}

/// Operations in flight and the check to run when all are complete.
class CheckedWork final : public Work {
 public:
  explicit CheckedWork(std::string_view what) : what_(what) {}
  void add(WorkPtr part) { parts_.push_back(std::move(part)); }
  /// Sets the check; it receives the name of the step.
  void then(std::function<void(const std::string& what)> check) { check_ = std::move(check); }

  bool test() override {
    for (const WorkPtr& part : parts_)
      if (!part->test()) return false;
    check();
    return true;
  }
  void wait() override {
    for (const WorkPtr& part : parts_) part->wait();
    check();
  }

 private:
  void check() {
    if (const auto once = std::exchange(check_, {})) once(what_);
  }

  std::string what_;
  std::vector<WorkPtr> parts_;
  std::function<void(const std::string& what)> check_;
};

/// Compares the checksums of the data received from each rank with those that the ranks sent.
void compare(const std::string& what, const std::vector<uint64_t>& here,
             const std::vector<uint64_t>& sent) {
  for (size_t r = 0; r < here.size(); ++r)
    if (here[r] != sent[r]) fail(what, fmt::format("what rank {} sent", r));
}

}  // namespace

CheckedCommunicator::CheckedCommunicator(std::unique_ptr<Communicator> transport)
    : CheckedCommunicator(std::move(transport), std::make_shared<bool>(true)) {}

CheckedCommunicator::CheckedCommunicator(std::unique_ptr<Communicator> transport,
                                         std::shared_ptr<bool> checking)
    : transport_(std::move(transport)), checking_(std::move(checking)) {
  GYRE_CHECK(transport_->space() == MemorySpace::host, "checksums of messages need host memory");
}

std::unique_ptr<Communicator> CheckedCommunicator::split(int color) {
  return std::unique_ptr<Communicator>(
      new CheckedCommunicator(transport_->split(color), checking_));
}

WorkPtr CheckedCommunicator::do_exchange(std::span<const SendSlice> sends,
                                         std::span<const RecvSlice> recvs, Stream& stream,
                                         std::string_view what) {
  if (!*checking_) return transport_->exchange(sends, recvs, stream, what);
  struct Sums {
    std::vector<RecvSlice> slices;
    std::map<int, uint64_t> sent, received;
  };
  const auto sums = std::make_shared<Sums>();
  sums->slices.assign(recvs.begin(), recvs.end());
  sums->sent = checksums_of(std::vector<SendSlice>(sends.begin(), sends.end()));
  for (const RecvSlice& recv : recvs) sums->received[recv.peer] = 0;
  std::vector<SendSlice> send_sums;
  std::vector<RecvSlice> recv_sums;
  for (const auto& [peer, sum] : sums->sent)
    send_sums.push_back({peer, bytes_of(std::span<const uint64_t>(&sum, 1))});
  for (auto& [peer, sum] : sums->received)
    recv_sums.push_back({peer, writable_bytes_of(std::span<uint64_t>(&sum, 1))});
  auto work = std::make_unique<CheckedWork>(what);
  work->add(transport_->exchange(sends, recvs, stream, what));
  work->add(transport_->exchange(send_sums, recv_sums, stream, what));
  work->then([sums](const std::string& step) {
    for (const auto& [peer, sum] : checksums_of(sums->slices))
      if (sum != sums->received.at(peer)) fail(step, fmt::format("what rank {} sent", peer));
  });
  return work;
}

WorkPtr CheckedCommunicator::do_collective(const Collective& call, Stream& stream,
                                           std::string_view what) {
  using Kind = Collective::Kind;
  if (!*checking_ || call.kind == Kind::barrier) return transport_->collective(call, stream, what);
  auto work = std::make_unique<CheckedWork>(what);
  if (call.kind == Kind::reduce_scatter || call.kind == Kind::all_reduce) {
    const auto again = std::make_shared<std::vector<std::byte>>(call.recv.begin(), call.recv.end());
    Collective second = call;
    second.recv = *again;
    work->add(transport_->collective(call, stream, what));
    work->add(transport_->collective(second, stream, what));
    work->then([again, recv = call.recv](const std::string& step) {
      if (std::memcmp(again->data(), recv.data(), again->size()) != 0)
        fail(step, "a part of a sum");
    });
    return work;
  }
  struct Sums {
    std::vector<int64_t> bytes;
    std::vector<uint64_t> sent, received;
  };
  const auto sums = std::make_shared<Sums>();
  sums->bytes.assign(call.recv_bytes.begin(), call.recv_bytes.end());
  sums->received.resize(call.recv_bytes.size());
  if (call.kind == Kind::all_to_all)
    sums->sent = checksums_of(call.send, call.send_bytes);
  else
    sums->sent = {checksum_of(call.kind == Kind::broadcast ? Bytes(call.recv) : call.send)};
  work->add(transport_->collective(call, stream, what));
  if (call.kind == Kind::broadcast)
    work->add(transport_->broadcast(write(sums->sent), call.root, stream, what));
  else if (call.kind == Kind::all_gather)
    work->add(transport_->all_gather(read(sums->sent), write(sums->received), stream, what));
  else
    work->add(transport_->all_to_all(read(sums->sent), write(sums->received), stream, what));
  work->then([sums, recv = call.recv, kind = call.kind, root = call.root](const std::string& step) {
    if (kind != Kind::broadcast)
      return compare(step, checksums_of(recv, sums->bytes), sums->received);
    if (checksum_of(recv) != sums->sent.front()) fail(step, fmt::format("what rank {} sent", root));
  });
  return work;
}

}  // namespace gyre
