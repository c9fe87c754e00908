#pragma once
// The chunked kernel of a recurrence on a GPU. It is a simple one: f32 arithmetic, no tensor cores,
// no copies ahead of the arithmetic. A chunk is computed as in chunk.hpp, but the triangular system
// of the delta rule is solved for all right sides at once, by its inverse X = (1 + R beta)^-1:
//
//     pairs       a block per chunk and head      P, R and X of a chunk
//     scan        a block per 32 columns of a     from chunk to chunk: residual = X (V - Ka S),
//                 head's state                    U = beta residual, out, S'
//     scan back   the same, the last chunk first  dU, dV = Xᵀ (beta dU), Y = dU - Rᵀ dV, dS
//     gradients   a block per chunk and head      d_q, d_k, d_g and d_beta, from the states before
//                                                 chunks and the gradients of those behind them
//     sums        a thread per element            d_q and d_k of a head of keys, over its values
//
// forward is pairs and scan; backward all of them, with a scan that keeps states. A summary is pairs
// and a scan of the state's and the map's columns, [B | M], that writes no output. Columns of a
// state do not depend on one another, so that a head of 128 values has 4 blocks.
//
// K: key_dim, V: value_dim, C: tokens of a chunk; per chunk and head, with the delta rule:
//
//                 FLOPs                               bytes of shared memory
//     pairs       2 C C K + C C C / 3                 256 K + 33 536
//     scan        6 C K V + 4 C C V                   392 K + 42 496
//     scan back   6 C K V + 6 C C V                   392 K + 42 496
//     gradients   6 C K V + 4 C C V + 8 C C K         93 440
//
// Between kernels, tiles and states are in device memory (device_scratch.hpp). If those of all heads
// are more than it allows, the heads of a call are computed in several rounds.

#include <memory>

#include "recurrence/device_scratch.hpp"
#include "recurrence/kernel.hpp"

namespace gyre {

/// Calls are asynchronous on `stream`, a CUDA stream that must outlive the kernel. Equal calls give
/// equal bits. `scratch`: bytes that a call may need in one round. Throws a usage error for key_dim >
/// 256 and for a GPU whose blocks have too little shared memory, a runtime error in a build without
/// CUDA.
std::unique_ptr<RecurrenceKernel> make_cuda_recurrence_kernel(
    const RecurrenceShape& shape, Stream& stream, int64_t scratch = device_scratch_bytes);

}  // namespace gyre
