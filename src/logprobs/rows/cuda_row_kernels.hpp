#pragma once
// Device implementation of row_kernels.hpp.
//
//     statistics, selection    one block per part of a row (32768 columns on every device); then
//                              a second kernel merges the parts of each row in order
//     gradients                one block per part of a row, weights of ids included
//     small arrays             one copy per direction through pinned memory, kept for the next
//                              pass; two for a gradient of many rows, whose first eighth runs
//                              while the host copies what the others need
//
// Memory bound: a pass reads 2 or 4 bytes per element (statistics, largest elements with or without
// partials, digit sums); a gradient also writes as many. Rows without gradient are only written.
// Loads and stores have 16 bytes wherever the rows of a call are aligned alike, and use streaming
// cache hints. Each element costs one exponential. A GPU with 16 exponentials per clock and
// multiprocessor, and 132 multiprocessors at 1.7 GHz, computes 3.6 T/s; 4.8 TB/s deliver 2.4 T/s
// bf16 elements. Memory is therefore the bound, but a second exponential would not fit: the maximum
// is updated once per vector of 4 or 8 elements, and the sums are rescaled when it grows. About ten
// other instructions per element, at 128 per clock, reach 2.8 T/s. To cover a load latency of 1 us,
// 4.8 TB/s need 36 KB in flight per multiprocessor. A thread has four vectors in flight (two per
// row if two rows are read): 48 to 96 KiB with the registers of sm_90 code, but 40 KiB in the
// selection from bf16 and in gradients from bf16 to f32. None of this has been measured.
//
// Further costs: lists of more than about 5000 entries are in device memory instead of shared
// memory. The K ids of a row are compared with each other in K² / 2 steps, which the pass hides for
// K = 1000 but not for K = 10000.

#include <memory>

#include "logprobs/rows/row_kernels.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Creates row passes over device matrices, submitted to the CUDA stream `stream`, which must
/// outlive them. Results have the same bits in every run and on every device of one kind. Throws a
/// runtime error in a build without CUDA.
std::unique_ptr<RowKernels> make_cuda_row_kernels(Stream& stream);

}  // namespace gyre
