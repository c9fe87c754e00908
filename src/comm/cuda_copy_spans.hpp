#pragma once
// Copies between spans of device memory, many by one kernel: each as a call of its own would cost
// more than most of them take.

#include <span>

#include "comm/coalesce.hpp"

struct CUstream_st;

namespace gyre {

/// Submits the copies, which do not overlap each other, to a stream: one launch for every 128 of
/// them; a single one is a call of CUDA's, which needs no multiprocessor. Limit: twice their bytes
/// over the memory bandwidth, by accesses of 16 bytes where both sides are aligned alike.
void cuda_copy_spans(std::span<const CoalescedExchange::Copy> copies, CUstream_st* stream);

}  // namespace gyre
