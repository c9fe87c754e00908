#pragma once
// Memory of the current CUDA device, and host memory that it reads and writes. Buffers are made of
// both (see buffer.hpp).
//
// cudaMalloc and cudaFree wait for the device and take up to milliseconds, so that memory which is
// given back is kept and handed out again:
//
//     allocate(bytes)   class = bytes rounded up to one of 8 sizes for each power of two, or 512
//                       a free block of the class, else one from CUDA
//                       CUDA has none: give all free blocks back to it, and try once more
//     release(block)    to the free blocks of its class, at once
//
// A block may thus be handed out while the device still works with it. That is right for what is
// submitted to one stream: the work of the new owner comes behind that of the old one. Hence the
// rule that all kernels and copies of a rank go on its compute stream. A communication stream is
// ordered with it: an operation starts behind the work that was on the compute stream when it was
// submitted, and its buffers may be released once Work::wait_on_stream() or wait() has put the
// compute stream behind it. Pinned memory is used by the host, which waits for no stream: it may be
// released only after the stream that copies it was synchronised.
//
// With GYRE_MEMORY_POOL=off in the environment every buffer comes from CUDA and goes back there, as
// a memory checker needs it to see an access behind the end.

#include <cstddef>
#include <cstdint>

#include "runtime/stream.hpp"

namespace gyre {

/// Memory of the current device, at least 256-byte aligned, or pinned memory, 64-byte aligned.
/// `poison`: device memory is filled with bytes 0xff (NaN in every floating-point type) before any
/// work that is submitted from now on; that waits for the device, and is for tests. Otherwise
/// nothing is initialised. Throws a runtime error that names the size and the reason: a build
/// without CUDA, no device, or what is free of the device's memory.
void* cuda_allocate(size_t bytes, MemorySpace space, bool poison);

/// Gives back what cuda_allocate returned. A failure of CUDA is ignored: the error that matters has
/// been reported by the call that caused it.
void cuda_release(void* pointer, MemorySpace space) noexcept;

/// A library that has device memory of its own kind, such as NCCL.
struct DeviceMemoryLibrary {
  void* (*allocate)(size_t bytes);  ///< nullptr when there is not enough
  void (*release)(void* block);
  size_t least_bytes;  ///< of a block that it is asked for
};
/// Large blocks that are not there yet come from the library from now on. In a build without CUDA:
/// nothing.
void use_device_memory_of(const DeviceMemoryLibrary& library);

/// How often this process has given device memory back so far. What remembers addresses of device
/// memory that it does not own, such as recorded work, asks whether that has changed.
int64_t cuda_releases();

/// Bytes of device memory that cuda_allocate can give out now on the current device. Throws a
/// runtime error in a build without CUDA.
int64_t cuda_memory_available();

}  // namespace gyre
