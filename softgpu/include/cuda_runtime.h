#pragma once
// What CUDA C++ adds to the language, for kernels that g++ compiles: the threads of a block are
// fibers of one thread of the host, and each runs until it meets a barrier.
//
// What a kernel may use: threadIdx, blockIdx, blockDim, gridDim; __shared__ variables;
// __syncthreads and its votes; the warp functions below with all 32 lanes; atomics; float4 and the
// like. Launches and dynamic shared memory: runtime/device_code.cuh.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda_runtime_api.h"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __shared__ static thread_local
#define __align__(n) alignas(n)
#define __constant__ static const
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline int2 make_int2(int x, int y) {
  return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

namespace softgpu {

/// A thread of the block that runs.
struct Position {
  uint3 thread;
  uint3 block;
  dim3 block_shape;
  dim3 grid_shape;
  int lane;
};
extern Position* running;  ///< null outside of kernels
inline const Position& here() {
  return *running;
}
void* dynamic_shared_memory();

/// Runs `body` once for each thread of each block.
struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};
cudaError_t launch(const LaunchShape& shape, std::function<void()> body);

void block_barrier();
/// A barrier that tells how many threads brought a predicate that is not 0.
int block_count(int predicate);
/// Waits for all lanes of the warp; all[lane] is then each lane's `mine`, at most 64 bytes, until
/// the next but one exchange of the warp.
struct Exchange {
  const std::byte* slots;
  template <class T>
  T get(int lane) const {
    T value;
    std::memcpy(&value, slots + lane * 64, sizeof(T));
    return value;
  }
};
/// `call`: the warp function; all lanes must have come to the same one.
Exchange warp_exchange(const void* mine, size_t bytes, const char* call);
inline int lane() {
  return here().lane;
}
template <class T>
T from_lane(T value, int lane, const char* call) {
  static_assert(sizeof(T) <= 64 && std::is_trivially_copyable_v<T>);
  const Exchange all = warp_exchange(&value, sizeof(T), call);
  return all.get<T>(lane);
}
void require_full_warp(unsigned mask);

/// For programs whose kernels say what they touch (race_hooks/): this one does, from now on.
void watch_shared_memory();
bool watches_shared_memory();
/// The thread that runs touches memory, which may be shared: see races.cpp.
enum class Access { read, write, atomic };
void touch_memory(const void* address, size_t bytes, Access access);

/// Copies of 16 bytes to shared memory, the last 16 - bytes of them zeros. A copy lands when its
/// thread waits for it, and not before: until then NaN is there, and what is copied is what the
/// source holds then.
void copy_async(void* shared, const void* from, int bytes);
/// Ends a group of copies of this thread.
void commit_copies();
/// Lands all but the latest `groups` groups of this thread.
void wait_copies(int groups);

/// A device ends the program at an address that is not aligned to what is read or written there;
/// the host would not.
inline void check_alignment(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
    throw std::runtime_error(std::to_string(bytes) +
                             " bytes at once at an address that is not aligned to them");
}

}  // namespace softgpu

#define threadIdx (::softgpu::here().thread)
#define blockIdx (::softgpu::here().block)
#define blockDim (::softgpu::here().block_shape)
#define gridDim (::softgpu::here().grid_shape)
constexpr int warpSize = 32;

inline void __syncthreads() {
  softgpu::block_barrier();
}
inline int __syncthreads_count(int predicate) {
  return softgpu::block_count(predicate);
}
inline int __syncthreads_or(int predicate) {
  return softgpu::block_count(predicate) != 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffU) {
  softgpu::require_full_warp(mask);
  softgpu::warp_exchange(nullptr, 0, "__syncwarp");
}
inline void __threadfence() {}
inline void __threadfence_block() {}

/// `width` lanes form a group of their own, as in CUDA.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  softgpu::require_full_warp(mask);
  const int lane = softgpu::lane();
  return softgpu::from_lane(value, lane / width * width + source % width, "__shfl_sync");
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  softgpu::require_full_warp(mask);
  const int lane = softgpu::lane(), other = lane ^ lanes;
  const int from = other / width <= lane / width ? other : lane;
  return softgpu::from_lane(value, from, "__shfl_xor_sync");
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
  softgpu::require_full_warp(mask);
  const int lane = softgpu::lane(), other = lane + static_cast<int>(lanes);
  const int from = other / width == lane / width ? other : lane;
  return softgpu::from_lane(value, from, "__shfl_down_sync");
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
  softgpu::require_full_warp(mask);
  const int lane = softgpu::lane(), other = lane - static_cast<int>(lanes);
  const int from = other >= lane / width * width ? other : lane;
  return softgpu::from_lane(value, from, "__shfl_up_sync");
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  softgpu::require_full_warp(mask);
  const int mine = predicate != 0;
  const softgpu::Exchange all = softgpu::warp_exchange(&mine, sizeof(mine), "a vote");
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all.get<int>(lane)) << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate == 0) == 0;
}
template <class T>
T softgpu_reduce(T value, const char* call, T (*merge)(T, T)) {
  const softgpu::Exchange all = softgpu::warp_exchange(&value, sizeof(value), call);
  T result = all.get<T>(0);
  for (int lane = 1; lane < 32; ++lane) result = merge(result, all.get<T>(lane));
  return result;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  softgpu::require_full_warp(mask);
  return softgpu_reduce<unsigned>(value, "__reduce_max_sync",
                                  [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  softgpu::require_full_warp(mask);
  return softgpu_reduce<unsigned>(value, "__reduce_add_sync",
                                  [](unsigned a, unsigned b) { return a + b; });
}

namespace softgpu {
template <class T>
void touch_atomic(const T* at) {
  if (watches_shared_memory()) touch_memory(at, sizeof(T), Access::atomic);
}
}  // namespace softgpu

// What they read and write is not said twice.
#define GYRE_ATOMIC  \
  template <class T> \
  __attribute__((no_sanitize("thread")))
GYRE_ATOMIC
T atomicAdd(T* to, T value) {
  softgpu::touch_atomic(to);
  const T old = *to;
  *to = old + value;
  return old;
}
GYRE_ATOMIC
T atomicMax(T* to, T value) {
  softgpu::touch_atomic(to);
  const T old = *to;
  *to = std::max(old, value);
  return old;
}
GYRE_ATOMIC
T atomicMin(T* to, T value) {
  softgpu::touch_atomic(to);
  const T old = *to;
  *to = std::min(old, value);
  return old;
}
GYRE_ATOMIC
T atomicOr(T* to, T value) {
  softgpu::touch_atomic(to);
  const T old = *to;
  *to = old | value;
  return old;
}
GYRE_ATOMIC
T atomicCAS(T* to, T expected, T value) {
  softgpu::touch_atomic(to);
  const T old = *to;
  if (old == expected) *to = value;
  return old;
}

#undef GYRE_ATOMIC

using std::max;
using std::min;
template <class T>
T __ldg(const T* from) {
  softgpu::check_alignment(from, sizeof(T));
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return __ldg(from);
}
template <class T>
void __stcs(T* to, T value) {
  softgpu::check_alignment(to, sizeof(T));
  *to = value;
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1;
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1 / x;
}
inline float rsqrtf(float x) {
  return 1 / std::sqrt(x);
}
