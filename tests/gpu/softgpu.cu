// The software GPU itself: what it lets pass, a test on it would let pass.

#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "gpu_test.hpp"
#include "mpi_test.hpp"
#include "runtime/device_code.cuh"

namespace gyre {
namespace {

#ifndef GYRE_SOFTGPU

TEST(SoftwareGpu, NeedsABuildForIt) {
  GTEST_SKIP() << "this build is for other GPUs";
}

#else

/// A stream, or an event, of its own.
struct Queue {
  explicit Queue(unsigned flags = cudaStreamNonBlocking) {
    GYRE_CHECK_CUDA(cudaStreamCreateWithFlags(&handle, flags));
  }
  ~Queue() { (void)cudaStreamDestroy(handle); }
  cudaStream_t handle = nullptr;
};
struct Event {
  Event() { GYRE_CHECK_CUDA(cudaEventCreate(&handle)); }
  ~Event() { (void)cudaEventDestroy(handle); }
  cudaEvent_t handle = nullptr;
};

/// A number in pinned memory that work of a stream sets.
class Probe {
 public:
  Probe() { number_[0] = 0; }
  void set(int value, cudaStream_t stream) {
    GYRE_CHECK_CUDA(cudaMemsetAsync(number_.data(), value, 1, stream));
  }
  int value() const { return number_[0]; }

 private:
  Buffer<unsigned char> number_{1, MemorySpace::pinned};
};

using SoftwareGpu = test::GpuTest;

// ---- streams

TEST_F(SoftwareGpu, WorkIsDoneWhenItIsWaitedFor) {
  Probe probe;
  probe.set(1, handle());
  EXPECT_EQ(probe.value(), 0);
  stream().synchronize();
  EXPECT_EQ(probe.value(), 1);
}

TEST_F(SoftwareGpu, APollMakesOneStepOfProgress) {
  Probe first, second;
  first.set(1, handle());
  second.set(1, handle());
  EXPECT_EQ(cudaStreamQuery(handle()), cudaErrorNotReady);
  EXPECT_EQ(first.value(), 1);
  EXPECT_EQ(second.value(), 0);
  EXPECT_EQ(cudaStreamQuery(handle()), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(handle()), cudaSuccess);
  EXPECT_EQ(second.value(), 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
}

TEST_F(SoftwareGpu, PageableMemoryIsReadAndWrittenBeforeReturn) {
  Buffer<int> there(1, MemorySpace::device);
  int pageable = 5, result = 0;
  stream().copy(there.data(), &pageable, sizeof(int));
  pageable = 7;
  stream().copy(&result, there.data(), sizeof(int));
  EXPECT_EQ(result, 5);
}

TEST_F(SoftwareGpu, PinnedMemoryIsReadWhenTheCopyRuns) {
  Buffer<int> there(1, MemorySpace::device), pinned(1, MemorySpace::pinned);
  pinned[0] = 6;
  stream().copy(there.data(), pinned.data(), sizeof(int));
  pinned[0] = 7;
  EXPECT_EQ(to_host(there)[0], 7);
}

TEST_F(SoftwareGpu, AStreamThatWaitsForAnEventForcesTheOtherUpToItsRecord) {
  Probe before, after, dependent;  // must outlive the work that sets them
  Queue first, second;
  Event event;
  before.set(1, first.handle);
  GYRE_CHECK_CUDA(cudaEventRecord(event.handle, first.handle));
  after.set(1, first.handle);
  GYRE_CHECK_CUDA(cudaStreamWaitEvent(second.handle, event.handle));
  dependent.set(1, second.handle);
  GYRE_CHECK_CUDA(cudaStreamSynchronize(second.handle));
  EXPECT_EQ(before.value(), 1);
  EXPECT_EQ(after.value(), 0);
  EXPECT_EQ(dependent.value(), 1);
}

TEST_F(SoftwareGpu, AWaitIsForTheRecordThatWasTheLatestThen) {
  Probe one, two;
  Queue first, second;
  Event event;
  GYRE_CHECK_CUDA(cudaStreamWaitEvent(second.handle, event.handle));  // not recorded: done
  one.set(1, first.handle);
  GYRE_CHECK_CUDA(cudaEventRecord(event.handle, first.handle));
  GYRE_CHECK_CUDA(cudaStreamWaitEvent(second.handle, event.handle));
  two.set(1, first.handle);
  GYRE_CHECK_CUDA(cudaEventRecord(event.handle, first.handle));
  GYRE_CHECK_CUDA(cudaStreamSynchronize(second.handle));
  EXPECT_EQ(one.value(), 1);
  EXPECT_EQ(two.value(), 0);
  GYRE_CHECK_CUDA(cudaEventSynchronize(event.handle));
  EXPECT_EQ(two.value(), 1);
}

TEST_F(SoftwareGpu, AnEventThatIsNotRecordedIsDone) {
  Event event;
  EXPECT_EQ(cudaEventQuery(event.handle), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event.handle), cudaSuccess);
  GYRE_CHECK_CUDA(cudaEventRecord(event.handle, handle()));
  EXPECT_EQ(cudaEventQuery(event.handle), cudaErrorNotReady);
  EXPECT_EQ(cudaEventQuery(event.handle), cudaSuccess);
  (void)cudaGetLastError();
}

TEST_F(SoftwareGpu, TimesAreThoseOfExecution) {
  Event begin, end, other;
  float milliseconds = -1;
  GYRE_CHECK_CUDA(cudaEventRecord(begin.handle, handle()));
  GYRE_CHECK_CUDA(cudaEventRecord(end.handle, handle()));
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin.handle, end.handle), cudaErrorNotReady);
  stream().synchronize();
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin.handle, end.handle), cudaSuccess);
  EXPECT_GE(milliseconds, 0);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin.handle, other.handle),
            cudaErrorInvalidResourceHandle);
  (void)cudaGetLastError();
}

TEST_F(SoftwareGpu, OnlyBlockingStreamsAreOrderedWithTheDefaultStream) {
  Probe in_ordered, in_free;
  Queue ordered(cudaStreamDefault), free;
  Buffer<int> there(1, MemorySpace::device);
  int here = 0;
  in_ordered.set(1, ordered.handle);
  in_free.set(1, free.handle);
  GYRE_CHECK_CUDA(cudaMemcpy(&here, there.data(), sizeof(int), cudaMemcpyDeviceToHost));
  EXPECT_EQ(in_ordered.value(), 1);
  EXPECT_EQ(in_free.value(), 0);
  GYRE_CHECK_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(in_free.value(), 1);
}

TEST_F(SoftwareGpu, DestroyingAStreamAndReleasingMemoryFinishWork) {
  Probe one, two;
  {
    const Queue queue;
    one.set(1, queue.handle);
  }
  EXPECT_EQ(one.value(), 1);
  void* memory = nullptr;
  GYRE_CHECK_CUDA(cudaMalloc(&memory, 64));
  two.set(1, handle());
  GYRE_CHECK_CUDA(cudaFree(memory));
  EXPECT_EQ(two.value(), 1);
}

// ---- memory

__global__ void write_at(unsigned char* data, int64_t at) {
  data[at] = 1;
}
__global__ void read_at(const unsigned char* data, int64_t at, unsigned char* to) {
  *to = data[at];
}

/// Device memory straight from CUDA: no pool between.
struct Memory {
  explicit Memory(size_t bytes) {
    void* memory = nullptr;
    GYRE_CHECK_CUDA(cudaMalloc(&memory, bytes));
    data = static_cast<unsigned char*>(memory);
  }
  ~Memory() { (void)cudaFree(data); }
  unsigned char* data = nullptr;
};

TEST_F(SoftwareGpu, NewMemoryIsNotANumber) {
  const Memory memory(4 * sizeof(float));
  std::vector<float> values(4);
  stream().copy(values.data(), memory.data, 4 * sizeof(float));
  for (const float x : values) EXPECT_TRUE(std::isnan(x));
}

TEST_F(SoftwareGpu, TheHostCannotTouchDeviceMemory) {
  const Memory memory(100), other(100);
  launch({1, 1, handle()}, write_at, memory.data, 5);
  stream().synchronize();
  EXPECT_DEATH(memory.data[5] = 0, "the host touched device memory at .* \\(an allocation");
  auto* gone = [] { return Memory(100).data; }();
  EXPECT_DEATH(*gone = 0, "the host touched device memory at .* \\(released");
}

TEST_F(SoftwareGpu, TheEndOfAnAllocationIsGuarded) {
  const Memory memory(4096), odd(40), other(1);
  const auto access = [&](const Memory& where, int64_t at) {
    launch({1, 2, handle()}, read_at, where.data, at, other.data);
    stream().synchronize();
  };
  access(memory, 4095);
  EXPECT_DEATH(access(memory, 4096),
               "thread \\(., 0, 0\\), touched .* 0 bytes behind an allocation");
  access(odd, 47);  // the end is guarded from the next multiple of 16 on
  EXPECT_DEATH(access(odd, 48), "8 bytes behind an allocation of 40 bytes");
}

TEST_F(SoftwareGpu, WritesBesideAnAllocationAreFoundWhenItIsReleased) {
  for (const int64_t at : {-1, 40}) {
    const Memory memory(40);
    const auto spoil = [&] {
      launch({1, 1, handle()}, write_at, memory.data, at);
      (void)cudaFree(memory.data);
    };
    EXPECT_DEATH(spoil(), at < 0 ? "written right before" : "written right behind");
  }
}

TEST_F(SoftwareGpu, MemoryIsReleasedInTheOrderOfAStream) {
  void* memory = nullptr;
  GYRE_CHECK_CUDA(cudaMallocAsync(&memory, 64, handle()));
  launch({1, 1, handle()}, write_at, static_cast<unsigned char*>(memory), 5);
  GYRE_CHECK_CUDA(cudaFreeAsync(memory, handle()));
  const auto touch = [&] {
    launch({1, 1, handle()}, write_at, static_cast<unsigned char*>(memory), 5);
    stream().synchronize();
  };
  EXPECT_DEATH(touch(), "touched .* released");
  stream().synchronize();  // the kernel before the release reaches it
  const Memory other(64);
  launch({1, 1, handle()}, write_at, other.data, 5);
  stream().synchronize();
  EXPECT_DEATH(other.data[5] = 0, "the host touched");
}

TEST_F(SoftwareGpu, ReleasedMemoryIsOutOfReachOfKernels) {
  unsigned char* gone = [] { return Memory(100).data; }();
  const auto touch = [&] {
    launch({1, 1, handle()}, write_at, gone, 0);
    stream().synchronize();
  };
  EXPECT_DEATH(touch(), "touched .* released or never allocated");
}

TEST_F(SoftwareGpu, WrongPointersAreErrors) {
  const Memory memory(64);
  int here = 0;
  EXPECT_EQ(cudaFree(&here), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(memory.data + 16), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(&here), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(memory.data, 0, 65, handle()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(&here, 0, 4, handle()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(memory.data + 61, &here, 4, cudaMemcpyHostToDevice, handle()),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(&here, memory.data, 4, cudaMemcpyHostToDevice, handle()),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(SoftwareGpu, PinnedMemoryStaysUntilItsCopiesAreDone) {
  const Memory memory(64);
  void* pinned = nullptr;
  GYRE_CHECK_CUDA(cudaHostAlloc(&pinned, 64, cudaHostAllocDefault));
  stream().copy(pinned, memory.data, 64);
  EXPECT_DEATH((void)cudaFreeHost(pinned), "pinned memory is released before");
  stream().synchronize();
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

TEST_F(SoftwareGpu, MemoryHasAnEnd) {
  size_t before = 0, after = 0, total = 0;
  GYRE_CHECK_CUDA(cudaMemGetInfo(&before, &total));
  void* all = nullptr;
  EXPECT_EQ(cudaMalloc(&all, before + 1), cudaErrorMemoryAllocation);
  {
    const Memory memory(1000);
    GYRE_CHECK_CUDA(cudaMemGetInfo(&after, &total));
    EXPECT_EQ(before - after, 1000u);
  }
  GYRE_CHECK_CUDA(cudaMemGetInfo(&after, &total));
  EXPECT_EQ(before, after);
  (void)cudaGetLastError();
}

TEST(SoftwareGpuDevices, TheEnvironmentSaysHowMany) {
  int count = -1;
  setenv("GYRE_SOFTGPU_DEVICES", "3", 1);
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 3);
  EXPECT_EQ(cudaSetDevice(3), cudaErrorInvalidDevice);
  setenv("GYRE_SOFTGPU_DEVICES", "0", 1);
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaErrorNoDevice);
  unsetenv("GYRE_SOFTGPU_DEVICES");
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 1);
  (void)cudaGetLastError();
}

// ---- kernels

__global__ void rotate(int* data, bool waits) {
  const unsigned i = threadIdx.x;
  auto* shared = reinterpret_cast<int*>(dynamic_shared());
  shared[i] = data[i];
  if (waits) __syncthreads();
  data[i] = shared[(i + 1) % blockDim.x];
}

/// The results of two launches in a row, which run in two of the three orders.
std::vector<std::vector<int> > rotate_twice(Stream& stream, bool waits) {
  std::vector<std::vector<int> > results;
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<int> values(64);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i);
    Buffer<int> data(64, MemorySpace::device);
    stream.copy(data.data(), values.data(), 64 * sizeof(int));
    launch({1, 64, cuda_handle(stream), 64 * sizeof(int)}, rotate, data.data(), waits);
    stream.copy(values.data(), data.data(), 64 * sizeof(int));
    results.push_back(values);
  }
  return results;
}

TEST_F(SoftwareGpu, AMissingBarrierShowsInEveryOrder) {
  const auto right = rotate_twice(stream(), true), wrong = rotate_twice(stream(), false);
  EXPECT_EQ(right[0], right[1]);
  EXPECT_EQ(right[0][0], 1);
  EXPECT_NE(wrong[0], right[0]);
  EXPECT_NE(wrong[1], right[0]);
  EXPECT_NE(wrong[0], wrong[1]);
}

__global__ void rotate_in_warp(int* data, bool waits) {
  const unsigned i = threadIdx.x;
  auto* shared = reinterpret_cast<int*>(dynamic_shared());
  shared[i] = data[i];
  if (waits) __syncwarp();
  data[i] = shared[(i + 1) % 32];
}

TEST_F(SoftwareGpu, AMissingBarrierOfAWarpShows) {
  for (const bool waits : {false, true})
    for (int turn = 0; turn < 2; ++turn) {
      std::vector<int> values(32, 3);
      Buffer<int> data = to_device<int>(values);
      launch({1, 32, handle(), 32 * sizeof(int)}, rotate_in_warp, data.data(), waits);
      EXPECT_EQ(to_host(data) == values, waits);
    }
}

/// Each lane copies its number, waits for what `how` says, and looks at it: or at another lane's.
__global__ void copy_and_look(const int* from, int* out, int how) {
  const unsigned i = threadIdx.x;
  auto* shared = reinterpret_cast<int4*>(dynamic_shared());
  copy_async(&shared[i], from + 4 * i);
  if (how > 0) commit_copies();
  if (how == 1) wait_copies<1>();
  if (how >= 2) wait_copies<0>();
  out[i] = shared[i].x;
}

TEST_F(SoftwareGpu, AnAsynchronousCopyLandsAtItsWait) {
  std::vector<int> values(128);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i / 4);
  const Buffer<int> from = to_device<int>(values);
  Buffer<int> out(32, MemorySpace::device);
  for (int how = 0; how < 3; ++how) {
    launch({1, 32, handle(), 32 * sizeof(int4)}, copy_and_look, from.data(), out.data(), how);
    const std::vector<int> found = to_host(out);
    for (int i = 0; i < 32; ++i) EXPECT_EQ(found[i], how == 2 ? i : -1) << "waiting like " << how;
  }
}

__global__ void count_of_block(int* counts, int limit) {
  const int i = static_cast<int>(threadIdx.x);
  const int below = __syncthreads_count(i < limit), any = __syncthreads_or(i == limit);
  counts[i] = 10 * below + any;
}

TEST_F(SoftwareGpu, VotesOfTheBlock) {
  Buffer<int> counts(48, MemorySpace::device);  // one and a half warps
  launch({1, 48, handle()}, count_of_block, counts.data(), 40);
  EXPECT_EQ(to_host(counts), std::vector<int>(48, 401));
  launch({1, 48, handle()}, count_of_block, counts.data(), 50);
  EXPECT_EQ(to_host(counts), std::vector<int>(48, 480));
}

__global__ void some_return_early(int* data) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  data[threadIdx.x] = 1;
}

TEST_F(SoftwareGpu, ABarrierDoesNotWaitForThreadsThatHaveReturned) {
  Buffer<int> data(40, MemorySpace::device);
  launch({1, 64, handle()}, some_return_early, data.data());
  EXPECT_EQ(to_host(data), std::vector<int>(40, 1));
}

__global__ void read_shared(float* out) {
  const auto* shared = reinterpret_cast<const float*>(dynamic_shared());
  out[blockIdx.x] = shared[0];
  reinterpret_cast<float*>(dynamic_shared())[0] = 1;
}

TEST_F(SoftwareGpu, SharedMemoryIsNotANumberAtTheStartOfEachBlock) {
  Buffer<float> out(3, MemorySpace::device);
  launch({3, 1, handle(), 16}, read_shared, out.data());
  for (const float x : to_host(out)) EXPECT_TRUE(std::isnan(x));
}

__global__ void misbehave(int how) {
  const auto lane = static_cast<int>(threadIdx.x);
  switch (how) {
    case 0:
      if (lane < 32) __syncthreads();
      if (lane >= 32) __syncwarp();
      if (lane >= 32) __syncthreads();
      break;
    case 1:
      if (lane == 5)
        __syncwarp();
      else
        __syncthreads();
      break;
    case 2:
      if (lane % 2 == 0)
        __shfl_sync(all_lanes, 1.0, 0);
      else
        __shfl_sync(all_lanes, 1, 0);
      break;
    case 3:
      __syncwarp(1);
      break;
    case 4:
      reinterpret_cast<volatile int*>(dynamic_shared())[8] = 1;
      break;
    case 5:
      throw std::runtime_error("a text");
    case 6:
      *reinterpret_cast<volatile int*>(static_cast<uintptr_t>(lane) * 4) = 1;
      break;
    case 7:
      load_once(dynamic_shared() + 8);
      break;
    case 8:
      store_once(dynamic_shared() + 8, {});
      break;
    case 9:
      copy_async(dynamic_shared(), dynamic_shared() + 8);
      break;
    case 10:
      copy_async(dynamic_shared() + 8, dynamic_shared());
      break;
    case 11:  // as many bytes, another function
      if (lane % 2 == 0)
        __shfl_sync(all_lanes, 1, 0);
      else
        __shfl_xor_sync(all_lanes, 1, 1);
  }
}

TEST_F(SoftwareGpu, KernelsThatWouldHangOrFailAreNamed) {
  const auto attempt = [&](int how) {
    launch({2, 64, handle(), 32}, misbehave, how);
    stream().synchronize();
  };
  attempt(0);
  const std::string name =
      "a launch of 2 x 1 x 1 blocks of 64 x 1 x 1 threads, block \\(., 0, 0\\).*";
  EXPECT_DEATH(attempt(1), name + "63 of 64 at a barrier of the block, 1 of 32 lanes of warp 0");
  EXPECT_DEATH(attempt(2), name + "different warp functions");
  EXPECT_DEATH(attempt(11),
               name + "__shfl_(xor_)?sync of 4 bytes and __shfl_(xor_)?sync of 4.*SEED");
  EXPECT_DEATH(attempt(3), name + "some of the lanes");
  EXPECT_DEATH(attempt(4), name + "touched what is behind its shared memory");
  EXPECT_DEATH(attempt(5), name + "an exception left the kernel: a text");
  EXPECT_DEATH(attempt(6), name + "touched .*, which is not its memory");
  for (const int how : {7, 8, 9, 10}) EXPECT_DEATH(attempt(how), name + "is not aligned");
}

#endif

}  // namespace
}  // namespace gyre
