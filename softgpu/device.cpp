// The host's side of the software GPU: devices, memory, streams, events.

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "softgpu.hpp"

struct CUstream_st {};
struct CUevent_st {
  double seconds = 0;
};

namespace softgpu {
namespace {

constexpr size_t memory_bytes = size_t{2} << 30;
constexpr size_t shared_bytes_of_block = 227 * 1024;

int devices() {
  const char* text = std::getenv("GYRE_SOFTGPU_DEVICES");
  return text == nullptr ? 1 : std::atoi(text);
}

thread_local cudaError_t last_error = cudaSuccess;
int current_device = 0;
std::map<void*, size_t> allocations;
size_t used_bytes = 0;
int64_t launches = 0;

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t allocate(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (devices() == 0) return note(cudaErrorNoDevice);
  if (bytes == 0) return cudaSuccess;
  if (used_bytes + bytes > memory_bytes) return note(cudaErrorMemoryAllocation);
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*pointer, 0xff, bytes);  // NaN
  allocations[*pointer] = bytes;
  used_bytes += bytes;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const auto found = allocations.find(pointer);
  if (found == allocations.end()) return note(cudaErrorInvalidValue);
  used_bytes -= found->second;
  allocations.erase(found);
  std::free(pointer);
  return cudaSuccess;
}

}  // namespace

cudaError_t launch(const LaunchShape& shape, std::function<void()> body) {
  const size_t threads = size_t{shape.block.x} * shape.block.y * shape.block.z;
  const size_t blocks = size_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  if (threads == 0 || threads > 1024 || blocks == 0 || shape.grid.x > 0x7fffffffU ||
      shape.grid.y > 65535 || shape.grid.z > 65535 || shape.shared_bytes > shared_bytes_of_block)
    return note(cudaErrorInvalidConfiguration);
  run_grid(shape, body, ++launches % 2 == 0 ? LaneOrder::reverse : LaneOrder::forward);
  return cudaSuccess;
}

}  // namespace softgpu

using softgpu::note;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
  }
  return "unknown error";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : cudaGetErrorName(error);
}
cudaError_t cudaGetLastError() {
  return std::exchange(softgpu::last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return softgpu::last_error;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = softgpu::devices();
  return *count == 0 ? note(cudaErrorNoDevice) : cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = softgpu::current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= softgpu::devices()) return note(cudaErrorInvalidDevice);
  softgpu::current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= softgpu::devices()) return note(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "software GPU");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = softgpu::memory_bytes;
  properties->sharedMemPerBlockOptin = softgpu::shared_bytes_of_block;
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->l2CacheSize = 1 << 20;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      return cudaSuccess;
  }
  return note(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = softgpu::memory_bytes;
  *free = *total - softgpu::used_bytes;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return softgpu::allocate(pointer, bytes);
}
cudaError_t cudaFree(void* pointer) {
  return softgpu::release(pointer);
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  return softgpu::allocate(pointer, bytes);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  return softgpu::release(pointer);
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *pointer == nullptr ? note(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}
cudaError_t cudaFreeHost(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row)
    std::memmove(static_cast<std::byte*>(to) + row * to_pitch,
                 static_cast<const std::byte*>(from) + row * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = static_cast<float>(1e3 * (end->seconds - begin->seconds));
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return static_cast<size_t>(value) > softgpu::shared_bytes_of_block ? note(cudaErrorInvalidValue)
                                                                     : cudaSuccess;
}
