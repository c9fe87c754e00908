#include "runtime/cuda_memory.hpp"

#include <string_view>

#include "core/error.hpp"
#include "runtime/cuda_check.hpp"

namespace gyre {
namespace {

std::string version_text(int version) {  // 13000 is CUDA 13.0
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string_view file_name(std::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

}  // namespace

bool means_no_device(cudaError_t code) {
  return code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver;
}

std::string describe_cuda(cudaError_t code) {
  const std::string text = fmt::format("{} ({}, {})", cudaGetErrorString(code),
                                       cudaGetErrorName(code), static_cast<int>(code));
  if (code != cudaErrorInsufficientDriver) return text;
  // CUDA has one error for "no driver" and "driver too old".
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
    return "no NVIDIA driver is loaded: " + text;
  return fmt::format("the NVIDIA driver supports CUDA {}, this build needs {}: {}",
                     version_text(driver), version_text(CUDART_VERSION), text);
}

void throw_cuda(cudaError_t code, const char* call, const char* file, int line) {
  const std::string text = describe_cuda(code);
  int device = -1;
  const bool has_device = !means_no_device(code) && cudaGetDevice(&device) == cudaSuccess;
  (void)cudaGetLastError();
  throw_runtime("{} failed at {}:{}{}: {}", call, file_name(file), line,
                has_device ? fmt::format(" on CUDA device {}", device) : "", text);
}

void* cuda_allocate(size_t bytes) {
  void* pointer = nullptr;
  const cudaError_t code = cudaMalloc(&pointer, bytes);
  if (code == cudaSuccess) return pointer;
  if (means_no_device(code))
    throw_runtime("no usable CUDA device for a buffer of {} bytes: {}", bytes, describe_cuda(code));
  if (code != cudaErrorMemoryAllocation) throw_cuda(code, "cudaMalloc", __FILE__, __LINE__);
  size_t free_bytes = 0, total_bytes = 0;
  int device = 0;
  GYRE_CHECK_CUDA(cudaGetDevice(&device));
  GYRE_CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  (void)cudaGetLastError();
  throw_runtime("no device memory for a buffer of {} bytes: {} of {} bytes are free on device {}",
                bytes, free_bytes, total_bytes, device);
}

void* cuda_allocate_pinned(size_t bytes) {
  void* pointer = nullptr;
  const cudaError_t code = cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable);
  if (code == cudaSuccess) return pointer;
  (void)cudaGetLastError();
  throw_runtime("no pinned memory for a buffer of {} bytes: {}", bytes, describe_cuda(code));
}

void cuda_release_pinned(void* pointer) noexcept {
  if (cudaFreeHost(pointer) != cudaSuccess) (void)cudaGetLastError();
}

void cuda_release(void* pointer) noexcept {
  if (cudaFree(pointer) != cudaSuccess) (void)cudaGetLastError();
}

}  // namespace gyre
