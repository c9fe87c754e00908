#include "comm/host_staging.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/buffer.hpp"

namespace gyre {
namespace {

/// Copies of an operation's host arrays in one device buffer, sources before results, and in one
/// pinned buffer for copies at full speed. There is one copy in each direction for all arrays.
class Mirror {
 public:
  explicit Mirror(Stream& stream) : stream_(stream) {}

  void add_source(std::span<const std::byte> from) {
    sources_.push_back({place(from.size()), from});
  }
  /// Must be called after all add_source().
  void add_result(std::span<std::byte> to) { results_.push_back({place(to.size()), to}); }
  /// Adds an array that is both source and result; it must be the only one.
  void add_both(std::span<std::byte> data) {
    sources_.push_back({0, data});
    results_.push_back({place(data.size()), data});
  }

  /// Submits the copy to the device.
  void upload() {
    device_ = Buffer<std::byte>(end_, MemorySpace::device);
    pinned_ = Buffer<std::byte>(end_, MemorySpace::pinned);
    if (sources_.empty()) return;
    for (const auto& [begin, from] : sources_) std::ranges::copy(from, pinned_.data() + begin);
    const auto& [last, data] = sources_.back();
    stream_.copy(device_.data(), pinned_.data(), last + data.size());
  }
  std::span<const std::byte> source(size_t i) const {
    return device_.span().subspan(sources_[i].begin, sources_[i].host.size());
  }
  std::span<std::byte> result(size_t i) {
    return device_.span().subspan(results_[i].begin, results_[i].host.size());
  }
  /// Copies the results back and waits for them.
  void download() {
    if (!results_.empty()) {
      const size_t begin = results_.front().begin;
      stream_.copy(pinned_.data() + begin, device_.data() + begin, end_ - begin);
    }
    stream_.synchronize();
    for (const auto& [begin, to] : results_)
      std::copy_n(pinned_.data() + begin, to.size(), to.begin());
  }

 private:
  /// Allocates with 16-byte alignment, for vector loads of reductions.
  size_t place(size_t bytes) { return std::exchange(end_, end_ + (bytes + 15) / 16 * 16); }

  template <class Byte>
  struct Array {
    size_t begin;
    std::span<Byte> host;
  };
  Stream& stream_;
  std::vector<Array<const std::byte>> sources_;
  std::vector<Array<std::byte>> results_;
  size_t end_ = 0;
  Buffer<std::byte> device_, pinned_;
};

/// An operation on copies of host arrays; complete once the results are copied back.
class HostStagingWork final : public Work {
 public:
  HostStagingWork(Mirror mirror, WorkPtr inner)
      : mirror_(std::move(mirror)), inner_(std::move(inner)) {}

  bool test() override {
    if (complete_) return true;
    if (inner_->test()) wait();
    return complete_;
  }
  void wait() override {
    if (complete_) return;
    inner_->wait();
    mirror_.download();
    complete_ = true;
  }

 private:
  Mirror mirror_;
  WorkPtr inner_;
  bool complete_ = false;
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
    Mirror mirror(stream_);
    for (const SendSlice& send : sends) mirror.add_source(send.data);
    for (const RecvSlice& recv : recvs) mirror.add_result(recv.data);
    mirror.upload();
    std::vector<SendSlice> device_sends;
    std::vector<RecvSlice> device_recvs;
    for (size_t i = 0; i < sends.size(); ++i)
      device_sends.push_back({sends[i].peer, mirror.source(i)});
    for (size_t i = 0; i < recvs.size(); ++i)
      device_recvs.push_back({recvs[i].peer, mirror.result(i)});
    return finish(std::move(mirror), device_.exchange(device_sends, device_recvs, stream_, what));
  }

  WorkPtr do_collective(const Collective& call, Stream&, std::string_view what) override {
    Mirror mirror(stream_);
    if (call.kind == Collective::Kind::barrier)
      return finish(std::move(mirror), device_.collective(call, stream_, what));
    if (call.in_place()) {
      mirror.add_both(call.recv);
    } else {
      mirror.add_source(call.send);
      mirror.add_result(call.recv);
    }
    mirror.upload();
    Collective there = call;
    if (!call.in_place()) there.send = mirror.source(0);
    there.recv = mirror.result(0);
    WorkPtr inner = device_.collective(there, stream_, what);
    return finish(std::move(mirror), std::move(inner));
  }

 private:
  static WorkPtr finish(Mirror mirror, WorkPtr inner) {
    return std::make_unique<HostStagingWork>(std::move(mirror), std::move(inner));
  }

  std::unique_ptr<Communicator> owned_;  ///< null if the caller owns it
  Communicator& device_;
  Stream& stream_;
};

}  // namespace

std::unique_ptr<Communicator> make_host_staging_communicator(Communicator& device, Stream& stream) {
  return std::make_unique<HostStagingCommunicator>(device, stream);
}

}  // namespace gyre
