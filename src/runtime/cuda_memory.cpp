#include "runtime/cuda_memory.hpp"

#include <atomic>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/error.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_memory_pool.hpp"
#include "runtime/host.hpp"

namespace gyre {
namespace {

std::string version_text(int version) {  // 13000 is CUDA 13.0
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string_view file_name(std::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

/// cudaFree and cudaFreeHost wait for the device, so a block is freed after the work that uses it.
class DeviceMemory final : public MemorySource {
 public:
  void* allocate(size_t bytes) override {
    void* pointer = nullptr;
    const cudaError_t code = cudaMalloc(&pointer, bytes);
    if (code == cudaSuccess) return pointer;
    if (means_no_device(code))
      throw_runtime("no usable CUDA device for a buffer of {} bytes: {}", bytes,
                    describe_cuda(code));
    if (code != cudaErrorMemoryAllocation) throw_cuda(code, "cudaMalloc", __FILE__, __LINE__);
    (void)cudaGetLastError();
    return nullptr;
  }
  void release(void* block) noexcept override {
    if (cudaFree(block) != cudaSuccess) (void)cudaGetLastError();
  }
  void fail(size_t bytes) override {
    size_t free_bytes = 0, total_bytes = 0;
    int device = 0;
    GYRE_CHECK_CUDA(cudaGetDevice(&device));
    GYRE_CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw_runtime(
        "no device memory for a buffer of {} bytes: "
        "{} of {} bytes are free on device {} of host {}",
        bytes, free_bytes, total_bytes, device, host_name());
  }
};

class PinnedMemory final : public MemorySource {
 public:
  void* allocate(size_t bytes) override {
    void* pointer = nullptr;
    const cudaError_t code = cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable);
    if (code == cudaSuccess) return pointer;
    (void)cudaGetLastError();
    why_ = describe_cuda(code);
    return nullptr;
  }
  void release(void* block) noexcept override {
    if (cudaFreeHost(block) != cudaSuccess) (void)cudaGetLastError();
  }
  void fail(size_t bytes) override {
    throw_runtime("no pinned memory for a buffer of {} bytes on host {}: {}", bytes, host_name(),
                  why_);
  }

 private:
  std::string why_;
};

bool pools_are_on() {
  const char* setting = std::getenv("GYRE_MEMORY_POOL");
  return setting == nullptr || std::string_view(setting) != "off";
}

struct Pools {
  DeviceMemory cuda_memory;
  LibrarySource device_memory{cuda_memory};
  PinnedMemory pinned_memory;
  MemoryPool device{device_memory, pools_are_on()};
  MemoryPool pinned{pinned_memory, pools_are_on()};
};

/// Never destroyed: buffers of static lifetime may outlive it; CUDA frees all memory at process
/// exit.
Pools& pools() {
  static Pools& all = *new Pools;
  return all;
}

void fill_with_nan(void* pointer, size_t bytes) {
  GYRE_CHECK_CUDA(cudaDeviceSynchronize());
  GYRE_CHECK_CUDA(cudaMemsetAsync(pointer, 0xff, bytes, nullptr));
  GYRE_CHECK_CUDA(cudaDeviceSynchronize());
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
  throw_runtime("{} failed at {}:{} on {}host {}: {}", call, file_name(file), line,
                has_device ? fmt::format("CUDA device {} of ", device) : "", host_name(), text);
}

void use_device_memory_of(const DeviceMemoryLibrary& library) {
  pools().device.replace_blocks();
  pools().device_memory.use(library);
}

void* cuda_allocate(size_t bytes, MemorySpace space, bool poison) {
  if (space == MemorySpace::pinned) return pools().pinned.take(bytes, 0);
  int device = 0;
  const cudaError_t code = cudaGetDevice(&device);
  if (code != cudaSuccess && !means_no_device(code))
    throw_cuda(code, "cudaGetDevice", __FILE__, __LINE__);
  void* pointer = pools().device.take(bytes, device);
  if (poison) fill_with_nan(pointer, bytes);
  return pointer;
}

namespace {
std::atomic<int64_t> releases = 0;
}  // namespace

int64_t cuda_releases() {
  return releases;
}

void cuda_release(void* pointer, MemorySpace space) noexcept {
  releases += space == MemorySpace::device;
  (space == MemorySpace::pinned ? pools().pinned : pools().device).give(pointer);
}

int64_t cuda_memory_available() {
  size_t free_bytes = 0, total_bytes = 0;
  int device = 0;
  GYRE_CHECK_CUDA(cudaGetDevice(&device));
  GYRE_CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  return static_cast<int64_t>(free_bytes + pools().device.free_bytes(device));
}

}  // namespace gyre
