#include "comm/host_staging.hpp"

#include <utility>
#include <vector>

#include "runtime/buffer.hpp"

namespace gyre {
namespace {

/// An array of host memory, and its copy on the device.
struct Mirror {
  std::span<std::byte> host;
  std::byte* device = nullptr;
};

/// An operation on copies of host arrays; complete once the results are copied back.
class HostStagingWork final : public Work {
 public:
  HostStagingWork(Stream& stream, Buffer<std::byte> memory, std::vector<Mirror> results,
                  WorkPtr inner)
      : stream_(stream),
        memory_(std::move(memory)),
        results_(std::move(results)),
        inner_(std::move(inner)) {}

  bool test() override {
    if (complete_) return true;
    if (inner_->test()) wait();
    return complete_;
  }
  void wait() override {
    if (complete_) return;
    inner_->wait();
    for (const Mirror& mirror : results_)
      stream_.copy(mirror.host.data(), mirror.device, mirror.host.size());
    stream_.synchronize();
    complete_ = true;
  }

 private:
  Stream& stream_;
  Buffer<std::byte> memory_;
  std::vector<Mirror> results_;
  WorkPtr inner_;
  bool complete_ = false;
};

/// Assigns offsets in one device buffer to the host arrays of an operation.
class Mirrors {
 public:
  /// 16-byte aligned, as vector loads of a reduction like it.
  size_t reserve(size_t bytes) { return std::exchange(end_, end_ + (bytes + 15) / 16 * 16); }
  Buffer<std::byte> make() const {
    return Buffer<std::byte>(static_cast<int64_t>(end_), MemorySpace::device);
  }

 private:
  size_t end_ = 0;
};

class HostStagingCommunicator final : public Communicator {
 public:
  HostStagingCommunicator(Communicator& device, Stream& stream)
      : device_(device), stream_(stream) {}
  HostStagingCommunicator(std::unique_ptr<Communicator> owned, Stream& stream)
      : owned_(std::move(owned)), device_(*owned_), stream_(stream) {}

  int rank() const override { return device_.rank(); }
  int size() const override { return device_.size(); }
  MemorySpace space() const override { return MemorySpace::host; }
  std::string_view backend() const override { return device_.backend(); }
  std::unique_ptr<Communicator> split(int color) override {
    return std::make_unique<HostStagingCommunicator>(device_.split(color), stream_);
  }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs, Stream&,
                      std::string_view what) override {
    Mirrors places;
    std::vector<size_t> starts;
    for (const SendSlice& send : sends) starts.push_back(places.reserve(send.data.size()));
    for (const RecvSlice& recv : recvs) starts.push_back(places.reserve(recv.data.size()));
    Buffer<std::byte> memory = places.make();
    std::vector<SendSlice> device_sends;
    std::vector<RecvSlice> device_recvs;
    std::vector<Mirror> results;
    size_t next = 0;
    for (const SendSlice& send : sends)
      device_sends.push_back({send.peer, upload(memory, starts[next++], send.data)});
    for (const RecvSlice& recv : recvs) {
      std::byte* place = memory.data() + starts[next++];
      device_recvs.push_back({recv.peer, {place, recv.data.size()}});
      results.push_back({recv.data, place});
    }
    WorkPtr inner = device_.exchange(device_sends, device_recvs, stream_, what);
    return finish(std::move(memory), std::move(results), std::move(inner));
  }

  WorkPtr do_all_gather_v(std::span<const std::byte> send, std::span<std::byte> recv,
                          std::span<const int64_t> recv_bytes, Stream&,
                          std::string_view what) override {
    return two_sided(send, recv, [&](auto from, auto to) {
      return device_.all_gather_v(from, to, recv_bytes, stream_, what);
    });
  }

  WorkPtr do_all_to_all_v(std::span<const std::byte> send, std::span<const int64_t> send_bytes,
                          std::span<std::byte> recv, std::span<const int64_t> recv_bytes, Stream&,
                          std::string_view what) override {
    return two_sided(send, recv, [&](auto from, auto to) {
      return device_.all_to_all_v(from, send_bytes, to, recv_bytes, stream_, what);
    });
  }

  WorkPtr do_reduce_scatter(const void* send, void* recv, int64_t count, DType type, ReduceOp op,
                            Stream&, std::string_view what) override {
    const size_t block = static_cast<size_t>(count) * size_of(type);
    return two_sided({static_cast<const std::byte*>(send), block * static_cast<size_t>(size())},
                     {static_cast<std::byte*>(recv), block}, [&](auto from, auto to) {
                       return device_.reduce_scatter(from.data(), to.data(), count, type, op,
                                                     stream_, what);
                     });
  }

  WorkPtr do_all_reduce(void* data, int64_t count, DType type, ReduceOp op, Stream&,
                        std::string_view what) override {
    return in_place({static_cast<std::byte*>(data), static_cast<size_t>(count) * size_of(type)},
                    [&](std::span<std::byte> there) {
                      return device_.all_reduce(there.data(), count, type, op, stream_, what);
                    });
  }

  WorkPtr do_broadcast(std::span<std::byte> data, int root, Stream&,
                       std::string_view what) override {
    return in_place(data, [&](std::span<std::byte> there) {
      return device_.broadcast(there, root, stream_, what);
    });
  }

  WorkPtr do_barrier(Stream&, std::string_view what) override {
    return finish({}, {}, device_.barrier(stream_, what));
  }

 private:
  std::span<std::byte> upload(Buffer<std::byte>& memory, size_t start,
                              std::span<const std::byte> data) {
    std::byte* place = memory.data() + start;
    stream_.copy(place, data.data(), data.size());
    return {place, data.size()};
  }

  template <class Operation>
  WorkPtr two_sided(std::span<const std::byte> send, std::span<std::byte> recv,
                    Operation operation) {
    Mirrors places;
    const size_t from = places.reserve(send.size()), to = places.reserve(recv.size());
    Buffer<std::byte> memory = places.make();
    const std::span<const std::byte> there = upload(memory, from, send);
    const std::span<std::byte> result{memory.data() + to, recv.size()};
    WorkPtr inner = operation(there, result);
    return finish(std::move(memory), {{recv, result.data()}}, std::move(inner));
  }

  template <class Operation>
  WorkPtr in_place(std::span<std::byte> data, Operation operation) {
    Buffer<std::byte> memory(std::ssize(data), MemorySpace::device);
    const std::span<std::byte> there = upload(memory, 0, data);
    WorkPtr inner = operation(there);
    return finish(std::move(memory), {{data, there.data()}}, std::move(inner));
  }

  WorkPtr finish(Buffer<std::byte> memory, std::vector<Mirror> results, WorkPtr inner) {
    return std::make_unique<HostStagingWork>(stream_, std::move(memory), std::move(results),
                                             std::move(inner));
  }

  std::unique_ptr<Communicator> owned_;  ///< none when the caller owns it
  Communicator& device_;
  Stream& stream_;
};

}  // namespace

std::unique_ptr<Communicator> make_host_staging_communicator(Communicator& device, Stream& stream) {
  return std::make_unique<HostStagingCommunicator>(device, stream);
}

}  // namespace gyre
