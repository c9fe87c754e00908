#pragma once
// Arrays of a call in memory of the host that kernels read and write: the caller's where the
// kernels can, else copies in pinned memory.

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Memory that grows to the requested number of elements and is kept.
template <class T>
std::span<T> at_least(Buffer<std::byte>& memory, int64_t count, MemorySpace space) {
  const auto bytes = static_cast<int64_t>(count * sizeof(T));
  if (memory.size() < bytes) {
    memory = {};
    memory = Buffer<std::byte>(bytes, space);
  }
  return {reinterpret_cast<T*>(memory.data()), static_cast<size_t>(count)};
}

/// A copy in the stream's memory, complete on return.
template <class T>
Buffer<T> in_space_of(Stream& stream, std::span<const T> array) {
  Buffer<T> copy(std::ssize(array), stream.space());
  stream.copy(copy.data(), array.data(), array.size_bytes());
  stream.synchronize();
  return copy;
}

class StagedArrays {
 public:
  explicit StagedArrays(Stream& stream) : stream_(stream) {}

  /// Starts a call. Waits for an earlier one that did not finish.
  void begin();
  /// Address at which kernels read a copy of the array, or the array itself; null if it is empty.
  template <class T>
  const T* input(std::span<const T> array) {
    if (array.empty()) return nullptr;
    void* const room = place(array.data(), array.size_bytes());
    if (room == nullptr) return array.data();
    std::copy(array.begin(), array.end(), static_cast<T*>(room));
    return static_cast<const T*>(room);
  }
  /// Address at which kernels write the array, which is complete after finish(); null if it is
  /// empty.
  template <class T>
  T* output(std::span<T> array) {
    if (array.empty()) return nullptr;
    void* const room = place(array.data(), array.size_bytes());
    if (room == nullptr) return array.data();
    outputs_.push_back({array.data(), room, array.size_bytes()});
    return static_cast<T*>(room);
  }
  /// Waits for the stream, and copies outputs to the caller's arrays.
  void finish();

 private:
  struct Output {
    void* to;
    const void* from;
    size_t bytes;
  };
  /// Room for a copy, or null if kernels reach the array itself.
  void* place(const void* array, size_t bytes);

  Stream& stream_;
  bool running_ = false;
  size_t used_ = 0;  // rooms of this call
  std::vector<Buffer<std::byte>> rooms_;
  std::vector<Output> outputs_;
};

}  // namespace gyre
