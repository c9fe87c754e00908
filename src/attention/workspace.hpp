#pragma once
// Memory that executors of plans reuse one after the other.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "runtime/buffer.hpp"

namespace gyre {

/// Memory for the arrays of plans, by storage number, and for copies of messages. It outlives the
/// executors (of layers, of bins), so that it is allocated once; it grows on demand.
class AttentionWorkspace {
 public:
  /// Allocates in this memory space from now on (initially the host's). Releases memory held in
  /// another space. An executor passes the space of its stream.
  void use(MemorySpace space);
  /// Memory of storage `id`, at least `bytes` bytes. Growing a storage loses its contents.
  std::span<std::byte> storage(int id, int64_t bytes);
  /// Takes a free staging buffer of at least `bytes` bytes, or allocates one. Return it with
  /// give_back().
  Buffer<float> take_staging(int64_t bytes);
  void give_back(Buffer<float> staging);
  int64_t bytes() const;

 private:
  MemorySpace space_ = MemorySpace::host;
  std::map<int, Buffer<float>> storages_;
  std::vector<Buffer<float>> free_;
  int64_t staging_bytes_ = 0;
};

}  // namespace gyre
