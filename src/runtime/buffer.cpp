#include "runtime/buffer.hpp"

#include <atomic>
#include <cstdlib>

#include "runtime/cuda_memory.hpp"

namespace gyre {
namespace {
std::atomic<bool> poison{false};
std::atomic<int64_t> current{0};
std::atomic<int64_t> peak{0};
}  // namespace

bool poison_new_buffers(bool on) {
  return poison.exchange(on);
}

MemoryUse memory_use() {
  return {current.load(), peak.load()};
}

void reset_memory_peak() {
  peak.store(current.load());
}

namespace detail {

bool poisoning() {
  return poison.load(std::memory_order_relaxed);
}

RawBuffer allocate(size_t bytes, MemorySpace space) {
  constexpr size_t alignment = 64;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* pointer = nullptr;
  if (rounded > 0) {
    pointer = space == MemorySpace::host ? std::aligned_alloc(alignment, rounded)
                                         : cuda_allocate(rounded, space, poisoning());
    if (pointer == nullptr)
      throw_runtime("no {} memory for a buffer of {} bytes", name_of(space), bytes);
    const int64_t now = current.fetch_add(rounded) + static_cast<int64_t>(rounded);
    int64_t seen = peak.load();
    while (seen < now && !peak.compare_exchange_weak(seen, now)) {
    }
  }
  return RawBuffer(pointer, Release{rounded, space});
}

void Release::operator()(void* pointer) const {
  if (pointer == nullptr) return;
  current.fetch_sub(bytes);
  if (space == MemorySpace::host)
    std::free(pointer);
  else
    cuda_release(pointer, space);
}

}  // namespace detail
}  // namespace gyre
