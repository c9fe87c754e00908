#pragma once
// Transfers of the row passes' small arrays between host and device.

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <utility>

#include "core/index.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_event.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre {

/// A buffer that grows to the requested size and is kept.
class Pool {
 public:
  explicit Pool(MemorySpace space) : space_(space) {}
  std::byte* at_least(int64_t bytes) {
    if (memory_.size() < bytes) {
      memory_ = {};
      memory_ = Buffer<std::byte>(bytes, space_);
    }
    return memory_.data();
  }

 private:
  MemorySpace space_;
  Buffer<std::byte> memory_;
};

/// Offsets of consecutive arrays, 256-byte aligned.
class Places {
 public:
  template <class T>
  int64_t add(int64_t count) {
    const int64_t begin = end_;
    end_ = round_up(end_ + count * sizeof(T), 256);
    return begin;
  }
  int64_t bytes() const { return end_; }

 private:
  int64_t end_ = 0;
};

/// Uploads of host arrays. A call's pinned memory is reused only after the device has read it; the
/// stream orders the use of device memory.
class Uploads {
 public:
  explicit Uploads(Stream& stream) : stream_(stream) {}

  /// Returns device addresses of copies, valid until the next call.
  template <class... T>
  std::tuple<const T*...> send(std::span<const T>... arrays) {
    Places places;
    const std::array<int64_t, sizeof...(T)> begins{places.add<T>(std::ssize(arrays))...};
    Slot& slot = slots_[next_++ % slots_.size()];
    slot.wait();
    std::byte* const host = slot.host.at_least(places.bytes());
    std::byte* const device = device_.at_least(places.bytes());
    size_t i = 0;
    ((std::copy(arrays.begin(), arrays.end(), reinterpret_cast<T*>(host + begins[i++]))), ...);
    stream_.copy(device, host, places.bytes());
    slot.copied.record(cuda_handle(stream_));
    slot.used = true;
    const std::byte* const arrived = device;
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return std::tuple<const T*...>{reinterpret_cast<const T*>(arrived + begins[i])...};
    }
    (std::index_sequence_for<T...>());
  }

 private:
  struct Slot {
    Pool host{MemorySpace::pinned};
    CudaEvent copied;
    bool used = false;

    void wait() const {
      while (used && !copied.done()) sched_yield();
    }
  };
  Stream& stream_;
  std::array<Slot, 4> slots_;
  size_t next_ = 0;
  Pool device_{MemorySpace::device};
};

/// Uploads beside a stream's earlier work; only its later work waits for them.
class UploadsAside {
 public:
  explicit UploadsAside(Stream& stream) : stream_(stream) {}

  /// Like Uploads::send. The addresses are valid until release().
  template <class... T>
  std::tuple<const T*...> send(std::span<const T>... arrays) {
    released_.wait_on_stream(cuda_handle(*aside_));
    const std::tuple<const T*...> sent = uploads_.send(arrays...);
    arrived_.record(cuda_handle(*aside_));
    arrived_.wait_on_stream(cuda_handle(stream_));
    used_ = true;
    return sent;
  }
  /// The caller promises that later work of the stream uses none of the addresses.
  void release() {
    if (std::exchange(used_, false)) released_.record(cuda_handle(stream_));
  }

 private:
  Stream& stream_;
  std::unique_ptr<Stream> aside_ = make_cuda_stream();
  Uploads uploads_{*aside_};
  CudaEvent arrived_, released_;
  bool used_ = false;
};

/// Downloads of results to the host.
class Download {
 public:
  explicit Download(Stream& stream) : stream_(stream) {}

  /// Returns the array in pinned memory, valid until the next call. Waits for the stream.
  template <class T>
  const T* fetch(const T* from, int64_t count) {
    const int64_t bytes = count * sizeof(T);
    std::byte* const to = memory_.at_least(bytes);
    stream_.copy(to, from, bytes);
    stream_.synchronize();
    return reinterpret_cast<const T*>(to);
  }

 private:
  Stream& stream_;
  Pool memory_{MemorySpace::pinned};
};

}  // namespace gyre
