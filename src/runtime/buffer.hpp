#pragma once
// Owning arrays in a memory space.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>

#include "core/error.hpp"
#include "core/view.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// When on, new floating-point arrays start as NaN and new device arrays as bytes 0xff. Tests use
/// it to find elements that are never written, or read before they are written. Returns the old
/// setting.
bool poison_new_buffers(bool on);

/// Bytes of host, pinned and device memory in the buffers of this process: now, and at the peak.
struct MemoryUse {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
};
MemoryUse memory_use();
/// Resets the peak to the current bytes.
void reset_memory_peak();

namespace detail {
struct Release {
  size_t bytes = 0;
  MemorySpace space = MemorySpace::host;
  void operator()(void* pointer) const;
};
using RawBuffer = std::unique_ptr<void, Release>;
/// Allocates, 64-byte aligned. Throws a runtime error with the size if memory is exhausted.
RawBuffer allocate(size_t bytes, MemorySpace space);
bool poisoning();
}  // namespace detail

/// `count` elements of a trivial type, 64-byte aligned, uninitialised (see poison_new_buffers).
/// Device and pinned memory comes from pools and may be reused as soon as the buffer is destroyed;
/// cuda_memory.hpp has the resulting rules for streams.
template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  explicit Buffer(int64_t count, MemorySpace space = MemorySpace::host)
      : raw_(detail::allocate(static_cast<size_t>(count) * sizeof(T), space)), count_(count) {
    if constexpr (std::is_floating_point_v<T>)
      if (space != MemorySpace::device && detail::poisoning())
        for (T& x : span()) x = std::numeric_limits<T>::quiet_NaN();
  }

  T* data() { return static_cast<T*>(raw_.get()); }
  const T* data() const { return static_cast<const T*>(raw_.get()); }
  int64_t size() const { return count_; }
  MemorySpace space() const { return raw_.get_deleter().space; }
  std::span<T> span() { return {data(), static_cast<size_t>(count_)}; }
  std::span<const T> span() const { return {data(), static_cast<size_t>(count_)}; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  MatrixView<T> matrix(int64_t rows, int64_t cols) {
    GYRE_CHECK(rows * cols <= count_, "{} x {} of {} elements", rows, cols, count_);
    return {data(), rows, cols};
  }
  MatrixView<const T> matrix(int64_t rows, int64_t cols) const {
    GYRE_CHECK(rows * cols <= count_, "{} x {} of {} elements", rows, cols, count_);
    return {data(), rows, cols};
  }

 private:
  detail::RawBuffer raw_;
  int64_t count_ = 0;
};

}  // namespace gyre
