#pragma once
// Memory of the current CUDA device and pinned host memory, for Buffer (see buffer.hpp).
//
// cudaMalloc and cudaFree wait for the device and take up to milliseconds. Released memory is
// therefore kept and reused:
//
//     allocate(bytes)   class = bytes rounded up to one of 8 sizes for each power of two, or 512
//                       a free block of the class, else one from CUDA;
//                       if CUDA has none: return all free blocks to CUDA and retry once
//     release(block)    adds it to the free blocks of its class at once
//
// A block may be reused while the device still works with it. This is correct within one stream:
// the new owner's work runs after the old owner's. Therefore all kernels and copies of a rank go on
// its compute stream. A communication stream is ordered with it: an operation starts after the work
// that was on the compute stream at submission, and its buffers may be released once
// Work::wait_on_stream() or wait() has ordered the compute stream after it. The host uses pinned
// memory without waiting for a stream, so pinned memory may be released only after the stream that
// copies it is synchronised.
//
// With GYRE_MEMORY_POOL=off in the environment, every buffer is allocated and freed by CUDA, so
// that a memory checker sees accesses past the end.

#include <cstddef>
#include <cstdint>

#include "runtime/stream.hpp"

namespace gyre {

/// Allocates memory of the current device, at least 256-byte aligned, or pinned memory, 64-byte
/// aligned. `poison` fills device memory with bytes 0xff (NaN in every floating-point type) before
/// any later work; it waits for the device and is for tests. Otherwise memory is uninitialised.
/// Throws a runtime error with the size and the reason: a build without CUDA, no device, or the
/// free bytes of the device.
void* cuda_allocate(size_t bytes, MemorySpace space, bool poison);

/// Releases memory of cuda_allocate. Ignores CUDA failures: the call that caused one has reported
/// it.
void cuda_release(void* pointer, MemorySpace space) noexcept;

/// A library with its own device memory, such as NCCL.
struct DeviceMemoryLibrary {
  void* (*allocate)(size_t bytes);  ///< returns nullptr if memory is exhausted
  void (*release)(void* block);
};
/// Allocates all later device buffers from `library`. No effect in a build without CUDA.
void use_device_memory_of(const DeviceMemoryLibrary& library);

/// Number of releases of device memory by this process so far. Holders of addresses that they do
/// not own, such as recorded work, use it to detect changes.
int64_t cuda_releases();

/// Bytes of device memory that cuda_allocate can now provide on the current device. Throws a
/// runtime error in a build without CUDA.
int64_t cuda_memory_available();

}  // namespace gyre
