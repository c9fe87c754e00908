#pragma once
// Errors of the CUDA runtime, for sources that call it.

#include <cuda_runtime_api.h>

#include <string>

namespace gyre {

/// Whether `code` means that no GPU is usable: no driver, a driver too old for this build, or no
/// device.
bool means_no_device(cudaError_t code);

/// "out of memory (cudaErrorMemoryAllocation, 2)"; for a missing or old driver, also the reason.
std::string describe_cuda(cudaError_t code);

/// Throws a runtime error with the call, its place and the meaning of `code`. Clears CUDA's last
/// error, so that no later check reports it.
[[noreturn]] void throw_cuda(cudaError_t code, const char* call, const char* file, int line);

inline void check_cuda(cudaError_t code, const char* call, const char* file, int line) {
  if (code != cudaSuccess) throw_cuda(code, call, file, line);
}

}  // namespace gyre

/// Calls a function of the CUDA runtime and throws a runtime error when it fails.
#define GYRE_CHECK_CUDA(call) ::gyre::check_cuda((call), #call, __FILE__, __LINE__)
