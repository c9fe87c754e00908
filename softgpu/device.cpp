// The host's side of the software GPU: devices, memory, streams, events.

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "softgpu.hpp"

namespace softgpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
int current_device = 0;
int64_t launches = 0;

cudaError_t allocate(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (devices() == 0) return note(cudaErrorNoDevice);
  if (const cudaError_t error = refuse_while_recording()) return error;
  if (bytes == 0) return cudaSuccess;
  *pointer = allocate_device(bytes);
  return *pointer == nullptr ? note(cudaErrorMemoryAllocation) : cudaSuccess;
}

/// Rows of `width` bytes, `pitch` bytes apart.
struct Rows {
  size_t width = 0, height = 1;
  size_t to_pitch = 0, from_pitch = 0;

  size_t to_bytes() const { return (height - 1) * to_pitch + width; }
  size_t from_bytes() const { return (height - 1) * from_pitch + width; }
  void copy(void* to, const void* from) const {
    for (size_t row = 0; row < height; ++row)
      std::memmove(static_cast<std::byte*>(to) + row * to_pitch,
                   static_cast<const std::byte*>(from) + row * from_pitch, width);
  }
};

bool possible(cudaMemcpyKind kind, Place to, Place from) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return to != Place::device && from != Place::device;
    case cudaMemcpyHostToDevice:
      return to == Place::device && from != Place::device;
    case cudaMemcpyDeviceToHost:
      return to != Place::device && from == Place::device;
    case cudaMemcpyDeviceToDevice:
      return to == Place::device && from == Place::device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

/// Host memory that is not pinned is read before return, and written before return.
cudaError_t copy(void* to, const void* from, const Rows& rows, cudaMemcpyKind kind,
                 cudaStream_t stream) {
  if (devices() == 0) return note(cudaErrorNoDevice);
  if (rows.width == 0 || rows.height == 0) return cudaSuccess;
  const Place to_place = place_of(to), from_place = place_of(from);
  if (!possible(kind, to_place, from_place) || !is_inside(to, rows.to_bytes()) ||
      !is_inside(from, rows.from_bytes()))
    return note(cudaErrorInvalidValue);
  // When a graph would read or write pageable memory is not said.
  if (to_place == Place::pageable || from_place == Place::pageable)
    if (const cudaError_t error = refuse_in_recorded(stream)) return error;
  Task task;
  if (to_place == Place::pinned) task.host[0] = to;
  if (from_place == Place::pinned) task.host[1] = from;
  if (from_place == Place::pageable && to_place != Place::pageable) {
    const auto* begin = static_cast<const std::byte*>(from);
    task.step = [to, rows, kept = std::vector<std::byte>(begin, begin + rows.from_bytes())] {
      rows.copy(to, kept.data());
      return Step::done;
    };
  } else {
    task.step = [to, from, rows] {
      rows.copy(to, from);
      return Step::done;
    };
  }
  submit(stream, std::move(task));
  if (to_place == Place::pageable) finish(stream);
  return cudaSuccess;
}

}  // namespace

int devices() {
  const char* text = std::getenv("GYRE_SOFTGPU_DEVICES");
  return text == nullptr ? 1 : std::atoi(text);
}

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t launch(const LaunchShape& shape, std::function<void()> body) {
  const size_t threads = size_t{shape.block.x} * shape.block.y * shape.block.z;
  const size_t blocks = size_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  if (devices() == 0) return note(cudaErrorNoDevice);
  if (threads == 0 || threads > 1024 || shape.block.z > 64 || blocks == 0 ||
      shape.grid.x > 0x7fffffffU || shape.grid.y > 65535 || shape.grid.z > 65535 ||
      shape.shared_bytes > shared_bytes_of_block)
    return note(cudaErrorInvalidConfiguration);
  submit(shape.stream, [shape, body = std::move(body)] {
    constexpr LaneOrder orders[] = {LaneOrder::forward, LaneOrder::reverse, LaneOrder::drawn};
    run_grid(shape, body, orders[launches++ % 3]);
  });
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
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureMerge:
      return "cudaErrorStreamCaptureMerge";
    case cudaErrorStreamCaptureUnmatched:
      return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorStreamCaptureUnjoined:
      return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation:
      return "cudaErrorStreamCaptureIsolation";
    case cudaErrorCapturedEvent:
      return "cudaErrorCapturedEvent";
  }
  return "unknown error";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoDevice ? "no CUDA-capable device is detected"
                                    : cudaGetErrorName(error);
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
  properties->sharedMemPerMultiprocessor = 228 << 10;
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
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
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
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  *total = softgpu::memory_bytes;
  *free = *total - softgpu::used_device_bytes();
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const softgpu::Place place = softgpu::place_of(pointer);
  attributes->type = place == softgpu::Place::pageable ? cudaMemoryTypeUnregistered
                     : place == softgpu::Place::pinned ? cudaMemoryTypeHost
                                                       : cudaMemoryTypeDevice;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return softgpu::allocate(pointer, bytes);
}
cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  softgpu::finish_all();
  return softgpu::release_device(pointer) ? cudaSuccess : note(cudaErrorInvalidValue);
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  return softgpu::allocate(pointer, bytes);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  if (pointer == nullptr) return cudaSuccess;
  if (softgpu::place_of(pointer) != softgpu::Place::device) return note(cudaErrorInvalidValue);
  softgpu::submit(stream, [pointer] {
    if (!softgpu::release_device(pointer)) softgpu::die("cudaFreeAsync of what is not allocated");
  });
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  *pointer = softgpu::allocate_pinned(bytes);
  return *pointer == nullptr ? note(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}
cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  if (softgpu::release_pinned(pointer)) return cudaSuccess;
  return note(cudaErrorInvalidValue);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  const cudaError_t error = softgpu::copy(to, from, {bytes, 1, bytes, bytes}, kind, nullptr);
  if (error == cudaSuccess) softgpu::finish(nullptr);
  return error;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return softgpu::copy(to, from, {bytes, 1, bytes, bytes}, kind, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return note(cudaErrorInvalidValue);
  return softgpu::copy(to, from, {width, height, to_pitch, from_pitch}, kind, stream);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  if (bytes == 0) return cudaSuccess;
  if (softgpu::place_of(to) == softgpu::Place::pageable || !softgpu::is_inside(to, bytes))
    return note(cudaErrorInvalidValue);
  softgpu::Task task;
  if (softgpu::place_of(to) == softgpu::Place::pinned) task.host[0] = to;
  task.step = [to, value, bytes] {
    std::memset(to, value, bytes);
    return softgpu::Step::done;
  };
  softgpu::submit(stream, std::move(task));
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return static_cast<size_t>(value) > softgpu::shared_bytes_of_block ? note(cudaErrorInvalidValue)
                                                                     : cudaSuccess;
}
