#pragma once
// Shared code of kernels: launches, dynamic shared memory, and instructions that CUDA C++ does not
// expose. Each has a plain counterpart for the software GPU.

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "core/bf16.hpp"
#include "core/host_device.hpp"
#include "runtime/cuda_check.hpp"

#ifdef __CUDACC__
#define GYRE_UNROLL _Pragma("unroll")
#define GYRE_NO_UNROLL _Pragma("unroll 1")
#else
#define GYRE_UNROLL
#define GYRE_NO_UNROLL
#endif

namespace gyre {

inline constexpr int warp_lanes = 32;
inline constexpr unsigned all_lanes = 0xffffffffU;

struct Launch {
  dim3 grid, block;
  cudaStream_t stream = nullptr;
  size_t shared_bytes = 0;  ///< dynamic
};

/// Launches `kernel` with `args`, converted to its parameters. Does nothing for an empty grid.
/// Throws a runtime error that names the launch if CUDA refuses it.
template <class... Parameters, class... Args>
void launch(const Launch& shape, void (*kernel)(Parameters...), Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  constexpr size_t without_asking = 48 * 1024;
  if (shape.shared_bytes > without_asking)
    GYRE_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shape.shared_bytes)));
#ifdef GYRE_SOFTGPU
  GYRE_CHECK_CUDA(softgpu::launch({shape.grid, shape.block, shape.shared_bytes, shape.stream},
                                  [kernel, ... values = static_cast<Parameters>(
                                               std::forward<Args>(args))] { kernel(values...); }));
#else
  const auto start = [&](Parameters... values) {
    void* pointers[] = {static_cast<void*>(&values)..., nullptr};
    GYRE_CHECK_CUDA(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), shape.grid, shape.block,
                                     pointers, shape.shared_bytes, shape.stream));
  };
  start(static_cast<Parameters>(std::forward<Args>(args))...);
#endif
}

/// The dynamic shared memory of the block, 16-byte aligned.
__device__ inline std::byte* dynamic_shared() {
#ifdef GYRE_SOFTGPU
  return static_cast<std::byte*>(softgpu::dynamic_shared_memory());
#else
  extern __shared__ __align__(16) std::byte gyre_dynamic_shared[];
  return gyre_dynamic_shared;
#endif
}

/// 2^x in one instruction; relative error 2^-22; 2^-inf is 0.
__device__ inline float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

/// Packs two values as bf16, rounded to nearest even, with `low` in the lower half.
__device__ inline uint32_t pack_bf16(float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint32_t>(to_bf16(low).bits) | static_cast<uint32_t>(to_bf16(high).bits) << 16;
#endif
}

/// Streaming load and store of 16 bytes, 16-byte aligned: the caches evict them first.
__device__ inline uint4 load_once(const void* from) {
  return __ldcs(static_cast<const uint4*>(from));
}
__device__ inline void store_once(void* to, uint4 value) {
  __stcs(static_cast<uint4*>(to), value);
}

/// Asks for the cache line of an address, for a later load by any block.
__device__ inline void prefetch_line(const void* address) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#else
  (void)address;
#endif
}

/// Copies 16 bytes, aligned to 16, from global to shared memory without registers; complete after
/// wait_copies. Bytes from index `bytes` on are set to 0; for 0, `from` is not read.
__device__ inline void copy_async(void* shared, const void* from, int bytes = 16) {
#ifdef __CUDA_ARCH__
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
#elif defined(GYRE_SOFTGPU)
  softgpu::copy_async(shared, from, bytes);
#endif
}
/// Ends a group of copies.
__device__ inline void commit_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#elif defined(GYRE_SOFTGPU)
  softgpu::commit_copies();
#endif
}
/// Waits until at most the latest `groups` groups of this thread are in flight.
template <int groups>
__device__ inline void wait_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
#elif defined(GYRE_SOFTGPU)
  softgpu::wait_copies(groups);
#endif
}

/// Sum, or maximum, over the lanes of the warp; all lanes get the same bits.
template <class T>
__device__ T warp_sum(T x) {
  for (int lanes = warp_lanes / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(all_lanes, x, lanes);
  return x;
}
__device__ inline float warp_max(float x) {
  for (int lanes = warp_lanes / 2; lanes > 0; lanes /= 2)
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, lanes));
  return x;
}

}  // namespace gyre
