#pragma once
// Pool of memory blocks that are kept after release; cuda_memory.hpp has the rules for streams.
// Independent of CUDA, so that tests can use a source with limited memory.

#include <compare>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "runtime/cuda_memory.hpp"

namespace gyre {

/// Source of a pool's blocks.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  /// Returns nullptr if memory is exhausted; throws on other errors.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* block) noexcept = 0;
  /// Throws the out-of-memory error for `bytes`.
  [[noreturn]] virtual void fail(size_t bytes) = 0;
};

/// A source that takes blocks from a library once one is set.
class LibrarySource final : public MemorySource {
 public:
  explicit LibrarySource(MemorySource& usual) : usual_(usual) {}
  void use(const DeviceMemoryLibrary& library) { library_ = library; }

  void* allocate(size_t bytes) override {
    if (!library_) return usual_.allocate(bytes);
    void* block = library_->allocate(bytes);
    if (block != nullptr) from_library_[block] = library_->release;
    return block;
  }
  void release(void* block) noexcept override {
    const auto found = from_library_.find(block);
    if (found == from_library_.end()) return usual_.release(block);
    found->second(block);
    from_library_.erase(found);
  }
  void fail(size_t bytes) override { usual_.fail(bytes); }

 private:
  MemorySource& usual_;
  std::optional<DeviceMemoryLibrary> library_;
  std::unordered_map<void*, void (*)(void*)> from_library_;
};

/// Block size for an allocation of `bytes` > 0: 512 bytes or more; above 512, at most an eighth
/// more than `bytes`.
constexpr size_t pool_block_bytes(size_t bytes) {
  constexpr size_t least = 512;
  if (bytes <= least) return least;
  size_t power = least;  // the largest power of two below `bytes`
  while (power < bytes - power) power *= 2;
  const size_t step = power / 8;
  return (bytes + step - 1) / step * step;
}

/// Thread-safe. The source must outlive it.
class MemoryPool {
 public:
  /// `keeps` false: every block has the exact size, comes from the source and returns to it.
  MemoryPool(MemorySource& source, bool keeps) : source_(source), keeps_(keeps) {}
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  /// Returns a free block, else one from the source; if the source has none, first returns all free
  /// blocks to it. Blocks of different `device` are kept apart.
  void* take(size_t bytes, int device) {
    const std::lock_guard lock(mutex_);
    const Block block{device, keeps_ ? pool_block_bytes(bytes) : bytes};
    std::vector<void*>& ready = ready_[block];
    void* pointer = nullptr;
    if (!ready.empty()) {
      pointer = ready.back();
      ready.pop_back();
    } else {
      pointer = source_.allocate(block.bytes);
      if (pointer == nullptr) {
        drop_all();
        pointer = source_.allocate(block.bytes);
      }
      if (pointer == nullptr) source_.fail(bytes);
    }
    taken_[pointer] = {block, keeps_};
    return pointer;
  }

  void give(void* pointer) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = taken_.find(pointer);
    if (found == taken_.end()) return;
    if (found->second.keeps)
      ready_[found->second.block].push_back(pointer);
    else
      source_.release(pointer);
    taken_.erase(found);
  }

  /// Reuses no block that exists now, because the source allocates another kind from now on.
  void replace_blocks() noexcept {
    const std::lock_guard lock(mutex_);
    drop_all();
    for (auto& [pointer, taken] : taken_) taken.keeps = false;
  }

  /// Bytes of the free blocks of `device`.
  size_t free_bytes(int device) const {
    const std::lock_guard lock(mutex_);
    size_t bytes = 0;
    for (const auto& [block, pointers] : ready_)
      if (block.device == device) bytes += block.bytes * pointers.size();
    return bytes;
  }

 private:
  struct Block {
    int device;
    size_t bytes;
    auto operator<=>(const Block&) const = default;
  };
  struct Taken {
    Block block;
    bool keeps;
  };

  void drop_all() noexcept {
    for (auto& [block, pointers] : ready_) {
      for (void* pointer : pointers) source_.release(pointer);
      pointers.clear();  // keeps the lists: take() holds a reference to one
    }
  }

  MemorySource& source_;
  bool keeps_;
  mutable std::mutex mutex_;
  std::map<Block, std::vector<void*>> ready_;
  std::unordered_map<void*, Taken> taken_;
};

}  // namespace gyre
