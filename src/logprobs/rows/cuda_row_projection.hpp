#pragma once
// Device implementation of row_projection.hpp.
//
//     forward     the partials of rows; then a thread for each column of the matrix and each row
//     backward    a block for each row sums d_c out_c; then one pass over the shard, in which each
//                 thread adds the entries of its own columns
//
// No two threads add to one place, so the bits do not depend on the order of threads.

#include <memory>

#include "logprobs/rows/row_projection.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Creates the passes on the CUDA stream `stream`, which must outlive them. Waits for the copy of
/// the matrix to the device.
std::unique_ptr<RowProjection> make_cuda_row_projection(Stream& stream,
                                                        const ProjectionShard& shard);

}  // namespace gyre
