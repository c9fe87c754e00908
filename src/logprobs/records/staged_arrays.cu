#include <cstring>

#include "core/error.hpp"
#include "logprobs/records/staged_arrays.hpp"
#ifdef GYRE_WITH_CUDA
#include "runtime/cuda_check.hpp"
#endif

namespace gyre {
namespace {

/// Whether the work of the stream may use this host memory.
bool is_reached([[maybe_unused]] const void* array, const Stream& stream) {
  if (stream.space() == MemorySpace::host) return true;
#ifdef GYRE_WITH_CUDA
  cudaPointerAttributes attributes{};
  GYRE_CHECK_CUDA(cudaPointerGetAttributes(&attributes, array));
  return attributes.type == cudaMemoryTypeHost;
#else
  return false;
#endif
}

}  // namespace

void StagedArrays::begin() {
  if (running_) stream_.synchronize();  // it may still use the copies
  running_ = true;
  used_ = 0;
  outputs_.clear();
}

void* StagedArrays::place(const void* array, size_t bytes) {
  if (is_reached(array, stream_)) return nullptr;
  if (used_ == rooms_.size()) rooms_.emplace_back();
  return at_least<std::byte>(rooms_[used_++], static_cast<int64_t>(bytes), MemorySpace::pinned)
      .data();
}

void StagedArrays::finish() {
  stream_.synchronize();
  running_ = false;
  for (const Output& output : outputs_) std::memcpy(output.to, output.from, output.bytes);
}

}  // namespace gyre
