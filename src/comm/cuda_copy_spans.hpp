#pragma once
// Copies spans within device memory, many per kernel launch, because most copies take less time
// than a launch.

#include <span>

#include "comm/coalesce.hpp"

struct CUstream_st;

namespace gyre {

/// Submits the copies, which must not overlap, to a stream: one launch per 128 copies. A single
/// copy is a cudaMemcpyAsync, which needs no multiprocessor. Memory bandwidth bounds the time.
/// Accesses have 16 bytes if source and target are aligned alike.
void cuda_copy_spans(std::span<const CoalescedExchange::Copy> copies, CUstream_st* stream);

}  // namespace gyre
