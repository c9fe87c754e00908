#pragma once
// Errors of the CUDA runtime, for sources that call it.

#include <cuda_runtime_api.h>

#include <string>

namespace gyre {

/// True when `code` says that this process has no GPU to work with: no driver, one that is too old
/// for this build, or no device.
bool means_no_device(cudaError_t code);

/// "out of memory (cudaErrorMemoryAllocation, 2)"; for a missing or old driver, what is missing.
std::string describe_cuda(cudaError_t code);

/// Throws a runtime error with the call, its place and what `code` means. CUDA's own record of the
/// error is cleared, so that no later check takes it for its own.
[[noreturn]] void throw_cuda(cudaError_t code, const char* call, const char* file, int line);

inline void check_cuda(cudaError_t code, const char* call, const char* file, int line) {
  if (code != cudaSuccess) throw_cuda(code, call, file, line);
}

}  // namespace gyre

/// Calls a function of the CUDA runtime and throws a runtime error when it fails.
#define GYRE_CHECK_CUDA(call) ::gyre::check_cuda((call), #call, __FILE__, __LINE__)
