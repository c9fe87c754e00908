#include <algorithm>

#include "comm/cuda_copy_spans.hpp"
#include "core/index.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/device_code.cuh"

namespace gyre {
namespace {

constexpr int threads = 256;
constexpr int max_copies = 128;  // per launch: 3 KiB of its 4 KiB of parameters
constexpr int64_t bytes_of_block = int64_t{64} << 10;

struct SpanCopy {
  const std::byte* from;
  std::byte* to;
  int64_t bytes;
};
struct SpanTable {
  SpanCopy copies[max_copies];
};

/// Copies bytes [begin, end) of a copy.
__device__ void copy_bytes(const SpanCopy& copy, int64_t begin, int64_t end) {
  for (int64_t i = begin + threadIdx.x; i < end; i += threads) copy.to[i] = copy.from[i];
}

/// Block (x, y) copies parts x, x + gridDim.x, ... of copy y.
__global__ void __launch_bounds__(threads) copy_spans(const __grid_constant__ SpanTable table) {
  constexpr int64_t wide = sizeof(uint4);
  const SpanCopy& copy = table.copies[blockIdx.y];
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(copy.to) % wide);
  const bool aligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(copy.from) % wide) == past;
  // Offset of the first aligned 16-byte element.
  const int64_t head = min(copy.bytes, past == 0 ? 0 : wide - past);
  for (int64_t part = blockIdx.x; part * bytes_of_block < copy.bytes; part += gridDim.x) {
    const int64_t begin = part == 0 ? 0 : part * bytes_of_block + head;
    const int64_t end = min(copy.bytes, (part + 1) * bytes_of_block + head);
    if (!aligned) {
      copy_bytes(copy, begin, end);
      continue;
    }
    const int64_t first = part == 0 ? head : begin, count = max(end - first, int64_t{0}) / wide;
    copy_bytes(copy, begin, min(first, end));
    const auto* from = reinterpret_cast<const uint4*>(copy.from + first);
    auto* to = reinterpret_cast<uint4*>(copy.to + first);
    for (int64_t i = threadIdx.x; i < count; i += threads) to[i] = from[i];
    copy_bytes(copy, first + count * wide, end);
  }
}

}  // namespace

void cuda_copy_spans(std::span<const CoalescedExchange::Copy> copies, CUstream_st* stream) {
  if (copies.size() == 1) {
    const CoalescedExchange::Copy& only = copies.front();
    GYRE_CHECK_CUDA(cudaMemcpyAsync(only.to.data(), only.from.data(), only.to.size(),
                                    cudaMemcpyDeviceToDevice, stream));
    return;
  }
  for (size_t begin = 0; begin < copies.size(); begin += max_copies) {
    const auto some = copies.subspan(begin, std::min<size_t>(max_copies, copies.size() - begin));
    SpanTable table;
    int64_t longest = 0;
    for (size_t i = 0; i < some.size(); ++i) {
      const auto bytes = std::ssize(some[i].to);
      table.copies[i] = {some[i].from.data(), some[i].to.data(), bytes};
      longest = std::max(longest, bytes);
    }
    constexpr int64_t max_parts = 1024;  // blocks per copy
    const auto parts =
        static_cast<unsigned>(std::min(max_parts, ceil_div(longest, bytes_of_block)));
    launch({dim3(parts, static_cast<unsigned>(some.size())), threads, stream}, copy_spans, table);
  }
}

}  // namespace gyre
