#pragma once
// CUDA streams. Without CUDA and without the software GPU there are no devices, make_cuda_stream
// throws, move_device_on does nothing, and cuda_handle is missing.

#include <memory>
#include <string>

#include "runtime/stream.hpp"

struct CUstream_st;  // cudaStream_t points to it

namespace gyre {

/// Number of usable CUDA devices; 0 without a driver. If it is 0, `why` receives the reason.
int usable_cuda_devices(std::string* why = nullptr);

/// Must be called while the host waits for other processes. A GPU progresses by itself; the
/// software GPU communicates here.
void move_device_on();

/// Creates a CUDA stream on the current device. The stream must outlive the Work objects of
/// operations submitted to it. Throws a runtime error in a build without CUDA.
std::unique_ptr<Stream> make_cuda_stream();

/// The cudaStream_t of a stream made by make_cuda_stream, for kernel launches and copies.
CUstream_st* cuda_handle(const Stream& stream);

}  // namespace gyre
