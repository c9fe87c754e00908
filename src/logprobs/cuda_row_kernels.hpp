#pragma once
// The passes of row_kernels.hpp on a device.
//
//     statistics, selection    a block of threads takes a part of a row (32768 columns,
//                              whatever the device), a second kernel the parts of each row in order
//     gradients                a block writes a part of a row; weights of ids are added behind that
//     small arrays             one copy of pinned memory each way, which is kept for the next pass
//
// Limits, of memory: a pass reads 2 or 4 bytes an element (statistics, the largest with or without
// moments, sums by digits), a gradient writes as many besides; rows without gradient are written
// only. Loads and stores are of 16 bytes wherever rows of one call are aligned alike, and each is
// meant to pass the caches. Of exponentials: one an element. A GPU that does 16 of them a clock and
// multiprocessor, with 132 of those at 1.7 GHz, does 3.6 T/s; at 4.8 TB/s come 2.4 T/s of bf16. So
// memory is the limit, but no second exponential would fit: the maximum is looked for once a vector
// of 4 or 8 elements, and sums move to a new one when there is one. About ten other instructions an
// element, of 128 a clock, take 2.8 T/s. 4.8 TB/s times the microsecond that a load takes are 36 KB
// a multiprocessor: a thread has four vectors under way (two of each row where two are read), which
// with the registers that sm_90 gets are 48 to 96 KiB, 40 in the selection from bf16 and in
// gradients from bf16 to f32. None of this has been measured.
//
// Time beyond that: lists of more than about 5000 entries are kept in device memory and not beside
// the multiprocessor; K ids a row are compared with each other, K² / 2 steps, which K = 1000 hides
// behind the pass and K = 10000 does not.

#include <memory>

#include "logprobs/row_kernels.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Row passes over matrices of device memory, submitted to `stream`, a CUDA stream, which must
/// outlive them. Results have the same bits in every run and on every device of one kind. Throws a
/// runtime error in a build without CUDA.
std::unique_ptr<RowKernels> make_cuda_row_kernels(Stream& stream);

}  // namespace gyre
