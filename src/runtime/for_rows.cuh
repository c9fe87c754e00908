#pragma once
// Loops over elements or rows, written once for the host and for a device:
//
//     for_elements(stream, n, f)   f(i)            i < n   host: a loop   device: a thread for each
//     for_rows(stream, n, f)       f(row, lanes)   row < n host: a loop   device: a warp for each
//
// f is a struct whose operator() is GYRE_HOST_DEVICE and const; what it points to is in the
// stream's memory. All lanes of a row call f. A lane takes elements lanes.first, lanes.first +
// lanes.count, ...; lanes.sum(x) is the sum of their x. The host has one lane.
//
// A file that includes this is a .cu file without "cuda" in its name. Every build compiles it;
// without CUDA it is C++, and a device is an error.

#include <cstdint>

#include "core/error.hpp"
#include "core/host_device.hpp"
#include "runtime/stream.hpp"
#ifdef GYRE_WITH_CUDA
#include "core/index.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"
#endif

namespace gyre {

struct OneLane {
  static constexpr int first = 0, count = 1;
  GYRE_HOST_DEVICE double sum(double x) const { return x; }
  GYRE_HOST_DEVICE void wait_for_others() const {}
};

#ifdef GYRE_WITH_CUDA
struct WarpLanes {
  static constexpr int count = warp_lanes;
  int first;
  GYRE_HOST_DEVICE double sum(double x) const {
#if defined(__CUDA_ARCH__) || defined(GYRE_SOFTGPU)
    return warp_sum(x);
#else
    return x;  // compiled for the host, never called
#endif
  }
  GYRE_HOST_DEVICE void wait_for_others() const {
#if defined(__CUDA_ARCH__) || defined(GYRE_SOFTGPU)
    __syncwarp();
#endif
  }
};

inline constexpr int loop_threads = 256;

template <class F>
__global__ void __launch_bounds__(loop_threads) elements_on_device(int64_t n, const F f) {
  const int64_t i = int64_t{blockIdx.x} * loop_threads + threadIdx.x;
  if (i < n) f(i);
}

template <class F>
__global__ void __launch_bounds__(loop_threads) rows_on_device(int64_t n, const F f) {
  constexpr int warps = loop_threads / warp_lanes;
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t row = int64_t{blockIdx.x} * warps + thread / warp_lanes;
  if (row < n) f(row, WarpLanes{thread % warp_lanes});
}

template <class F>
void launch_loop(Stream& stream, void (*kernel)(int64_t, F), int64_t n, int64_t of_block,
                 const F& f) {
  const int64_t blocks = ceil_div(n, of_block);
  GYRE_CHECK(blocks <= 0x7fffffff, "{} blocks", blocks);
  launch({static_cast<unsigned>(blocks), loop_threads, cuda_handle(stream)}, kernel, n, f);
}
#endif

template <class F>
void for_elements(Stream& stream, int64_t n, const F& f) {
  if (stream.space() == MemorySpace::host) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
#ifdef GYRE_WITH_CUDA
  launch_loop(stream, elements_on_device<F>, n, loop_threads, f);
#else
  throw_runtime("rows on a GPU: this build has no CUDA");
#endif
}

template <class F>
void for_rows(Stream& stream, int64_t n, const F& f) {
  if (stream.space() == MemorySpace::host) {
    for (int64_t row = 0; row < n; ++row) f(row, OneLane());
    return;
  }
#ifdef GYRE_WITH_CUDA
  launch_loop(stream, rows_on_device<F>, n, loop_threads / warp_lanes, f);
#else
  throw_runtime("rows on a GPU: this build has no CUDA");
#endif
}

}  // namespace gyre
