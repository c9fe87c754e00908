#pragma once
// CUDA streams. In a build without CUDA (or the software GPU) make_cuda_stream throws,
// move_device_on does nothing, and the rest is not there.

#include <memory>
#include <string>

#include "runtime/stream.hpp"

struct CUstream_st;  // cudaStream_t points to it

namespace gyre {

/// Number of usable CUDA devices; 0 without a driver. `why` receives the reason when it is 0.
int usable_cuda_devices(std::string* why = nullptr);

/// To be called while the host waits for other processes. A GPU goes on by itself; the software GPU
/// communicates here.
void move_device_on();

/// A new CUDA stream on the current device. It must outlive the Works submitted with it. Throws a
/// runtime error in a build without CUDA.
std::unique_ptr<Stream> make_cuda_stream();

/// The cudaStream_t of a stream made by make_cuda_stream, for kernel launches and copies.
CUstream_st* cuda_handle(const Stream& stream);

}  // namespace gyre
