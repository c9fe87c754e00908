#pragma once
// Memory of the current CUDA device. Buffers are made of it (see buffer.hpp).

#include <cstddef>

namespace gyre {

/// At least 256-byte aligned, not initialised. Throws a runtime error that names the size and the
/// reason: no device, or what is free of the device's memory.
void* cuda_allocate(size_t bytes);

/// Gives back what cuda_allocate returned, after all work on the device that was submitted before.
/// A failure is ignored: the error that matters has been reported by the call that caused it.
void cuda_release(void* pointer) noexcept;

/// Host memory that the device reads and writes too; 64-byte aligned, not initialised. Throws as
/// above.
void* cuda_allocate_pinned(size_t bytes);
void cuda_release_pinned(void* pointer) noexcept;

}  // namespace gyre
