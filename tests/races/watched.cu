// That races for shared memory are found: kernels that are compiled as those of the tests beside
// this one are.

#include <string>

#include "gpu_test.hpp"
#include "runtime/device_code.cuh"

namespace gyre {
namespace {

using RacesForSharedMemory = test::GpuTest;

constexpr unsigned threads = 64;

/// What lies between a write of one thread and a read of another.
enum class Between { nothing, warp, block };

__device__ void pass(Between between) {
  if (between == Between::warp) __syncwarp();
  if (between == Between::block) __syncthreads();
}

__global__ void read_after_write(int* out, int distance, Between between) {
  auto* shared = reinterpret_cast<int*>(dynamic_shared());
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  pass(between);
  out[threadIdx.x] = shared[(threadIdx.x + static_cast<unsigned>(distance)) % threads];
}

__global__ void write_after_read(int* out, int distance, Between between) {
  __shared__ int shared[threads];
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + static_cast<unsigned>(distance)) % threads];
  pass(between);
  shared[threadIdx.x] = 0;
}

__global__ void write_after_reads_of_all(int* out, Between between) {
  __shared__ int shared;
  shared = 7;  // of all threads, found before anything else
  pass(between);
  out[threadIdx.x] = shared;
}

__global__ void one_writes(int* out, Between between) {
  __shared__ int shared;
  if (threadIdx.x == 0) shared = 7;
  __syncthreads();
  out[threadIdx.x] = shared;
  pass(between);
  if (threadIdx.x == 0) shared = 8;
}

__global__ void halves(bf16* out, int distance) {
  __shared__ bf16 shared[threads];
  shared[threadIdx.x] = to_bf16(1);  // side by side, in one word
  __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + static_cast<unsigned>(distance)) % threads];
}

__global__ void counted(int* out, Between before, Between behind) {
  __shared__ int count;
  if (threadIdx.x == 5) count = 0;
  pass(before);
  atomicAdd(&count, 1);
  pass(behind);
  out[threadIdx.x] = count;
}

struct Pair {
  double a, b, c;
};
__device__ Pair pair_of(int x) {
  return {static_cast<double>(x), 1, 2};
}
__global__ void returned(int* out, Between between) {
  auto* shared = reinterpret_cast<Pair*>(dynamic_shared());
  if (threadIdx.x < 8) shared[threadIdx.x] = pair_of(static_cast<int>(threadIdx.x));
  pass(between);
  out[threadIdx.x] = static_cast<int>(shared[threadIdx.x % 8].a);
}

__global__ void copied(float4* out, const float4* in, bool waits) {
  auto* shared = reinterpret_cast<float4*>(dynamic_shared());
  copy_async(shared + threadIdx.x, in + threadIdx.x);
  commit_copies();
  wait_copies<0>();
  if (waits) __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x ^ 1U];
}

template <class... Parameters, class... Args>
void run(Stream& stream, void (*kernel)(Parameters...), Args... args) {
  launch({1, threads, cuda_handle(stream), threads * sizeof(float4)}, kernel, args...);
  stream.synchronize();
}

const char* const found = "touch the same shared memory with no barrier between";

TEST_F(RacesForSharedMemory, AreFoundWhereABarrierIsMissing) {
  Buffer<int> out(threads, MemorySpace::device);
  int* const to = out.data();
  for (auto* kernel : {read_after_write, write_after_read}) {
    EXPECT_DEATH(run(stream(), kernel, to, 1, Between::nothing), found);
    EXPECT_DEATH(run(stream(), kernel, to, 32, Between::warp), found);  // of another warp
    run(stream(), kernel, to, 1, Between::block);
    run(stream(), kernel, to, 0, Between::nothing);  // a thread's own
  }
  EXPECT_DEATH(run(stream(), write_after_reads_of_all, to, Between::block), found);
  for (const Between between : {Between::nothing, Between::warp})
    EXPECT_DEATH(run(stream(), one_writes, to, between), found);
  run(stream(), one_writes, to, Between::block);
}

TEST_F(RacesForSharedMemory, FunctionsOfAWarpOrderItsLanes) {
  Buffer<int> out(threads, MemorySpace::device);
  const auto rotate = [&](auto* kernel, Between between) {
    launch({1, 32, cuda_handle(stream()), threads * sizeof(int)}, kernel, out.data(), 0, between);
    stream().synchronize();
  };
  rotate(read_after_write, Between::warp);
  rotate(write_after_read, Between::warp);
}

TEST_F(RacesForSharedMemory, NeighboursInAWordAreTwo) {
  Buffer<bf16> out(threads, MemorySpace::device);
  for (const int distance : {0, 1, 33}) run(stream(), halves, out.data(), distance);
}

TEST_F(RacesForSharedMemory, AtomicsRaceWithOthersAlone) {
  Buffer<int> out(threads, MemorySpace::device);
  run(stream(), counted, out.data(), Between::block, Between::block);
  EXPECT_DEATH(run(stream(), counted, out.data(), Between::warp, Between::block), found);
  EXPECT_DEATH(run(stream(), counted, out.data(), Between::block, Between::warp), found);
}

TEST_F(RacesForSharedMemory, WhatACallReturnsIsWritten) {
  Buffer<int> out(threads, MemorySpace::device);
  EXPECT_DEATH(run(stream(), returned, out.data(), Between::nothing), found);
  run(stream(), returned, out.data(), Between::block);
}

TEST_F(RacesForSharedMemory, AsynchronousCopiesAreWritesOfTheirThread) {
  Buffer<float4> in(threads, MemorySpace::device), out(threads, MemorySpace::device);
  EXPECT_DEATH(run(stream(), copied, out.data(), in.data(), false), found);
  run(stream(), copied, out.data(), in.data(), true);
}

}  // namespace
}  // namespace gyre
