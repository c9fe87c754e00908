#include "attention/workspace.hpp"

#include <utility>

#include "core/index.hpp"

namespace gyre {
namespace {

Buffer<float> buffer_of_bytes(int64_t bytes, MemorySpace space) {
  return Buffer<float>(ceil_div(bytes, sizeof(float)), space);
}
int64_t bytes_of(const Buffer<float>& buffer) {
  return buffer.size() * sizeof(float);
}

}  // namespace

void AttentionWorkspace::use(MemorySpace space) {
  if (space == space_) return;
  storages_.clear();
  free_.clear();
  staging_bytes_ = 0;
  space_ = space;
}

std::span<std::byte> AttentionWorkspace::storage(int id, int64_t bytes) {
  Buffer<float>& buffer = storages_[id];
  if (bytes_of(buffer) < bytes) {
    buffer = {};  // release first: both may not fit together
    buffer = buffer_of_bytes(bytes, space_);
  }
  return std::as_writable_bytes(buffer.span()).first(bytes);
}

Buffer<float> AttentionWorkspace::take_staging(int64_t bytes) {
  auto best = free_.end();  // smallest sufficient buffer; larger ones stay free for larger messages
  for (auto b = free_.begin(); b != free_.end(); ++b)
    if (bytes_of(*b) >= bytes && (best == free_.end() || b->size() < best->size())) best = b;
  if (best != free_.end()) {
    Buffer<float> staging = std::move(*best);
    free_.erase(best);
    return staging;
  }
  if (!free_.empty()) {
    staging_bytes_ -= bytes_of(free_.back());
    free_.pop_back();  // too small: replaced by a larger one
  }
  Buffer<float> staging = buffer_of_bytes(bytes, space_);
  staging_bytes_ += bytes_of(staging);
  return staging;
}

void AttentionWorkspace::give_back(Buffer<float> staging) {
  free_.push_back(std::move(staging));
}

int64_t AttentionWorkspace::bytes() const {
  int64_t sum = staging_bytes_;
  for (const auto& [id, buffer] : storages_) sum += bytes_of(buffer);
  return sum;
}

}  // namespace gyre
