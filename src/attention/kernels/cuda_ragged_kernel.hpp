#pragma once
// A block kernel on top of a library's fused attention.
//
//     plan       rectangles -> joined (joined.hpp, staircase.hpp) -> a few batches of sequences
//                (ragged_batch.hpp); inverse ones -> a call on reversed rows (reversed_rows.hpp)
//     forward    each batch -> library -> (O, LSE) of its entries, in scratch rows
//                scratch rows merged into the running (O, LSE) (cuda_merge.hpp)
//     backward   O' with <O', dO> = delta, and the LSE, of all rows that entries touch
//                each batch -> library -> dQ, dK, dV of its entries in bf16 -> added to the sums
//
// A library's backward pass is that of a whole softmax, p = exp(x - LSE), dS = p (dP - <O, dO>).
// Given the LSE of the whole row and an O' with the right <O', dO>, it is also correct for a part
// of the keys.
//
// Overwriting results, or a given O (block_kernel.hpp), saves steps. Scratch rows of the first
// batch to write a row replace the result. Such a batch needs no scratch for O and LSE (backward:
// for dQ) if that array is bf16 and 16-byte aligned and the batch is even or covers all rows of it.
// A given O is read in place, with its LSE, if it is bf16 and aligned; delta is then not needed,
// and not computed.
//
// Even batches (ragged_batch.hpp) of long entries use graphs without tables, for which libraries
// have faster engines.
//
// The tiled kernel (cuda_kernel.hpp) computes the rest: whole calls (f32 arrays, head_dim not a
// multiple of 16 or too large for the device, parts of a head group, rows that are not 16-byte
// aligned), single rectangles (inverse ones whose queries see few keys, fixed tiles, unequal
// strides), or batches for which the library has no engine. note() counts them.
//
// Lower bound of the time: the FLOPs of the visible pairs at the rate that the library reaches,
// plus the bytes of merges and additions at the memory bandwidth. Forward: 6 to 10 bytes per
// element of out. Backward: 14 per element of dQ, 10 of dK and dV. Overwritten results: forward 0
// (in place) or 6; backward 0 (in place, with O) to 10 for dQ, 6 for dK and dV. With equal numbers
// of query and KV heads, a ragged batch gathers K and V, 4 bytes more per element of each (see
// attention_library.hpp). For comparison, a causal sequence of S tokens needs 2 S FLOPs forward and
// 5 S backward per element of out.

#include <memory>

#include "attention/kernels/attention_library.hpp"
#include "attention/kernels/block_kernel.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// A kernel whose calls are submitted to `stream`, a CUDA stream that must outlive it. Arrays lie
/// in device memory; rectangles lie on the host and may change after the call. The first call of a
/// shape builds a graph; shapes are rounded up to powers of two, so that there are few. The
/// backward pass is deterministic where the library offers that at a moderate cost; note() reports
/// where it was not. With `deterministic` it always is: the tiled kernel computes what the library
/// cannot compute deterministically, and a workspace that does not fit is a runtime error that
/// names its bytes.
std::unique_ptr<BlockKernel> make_ragged_kernel(Stream& stream,
                                                std::unique_ptr<AttentionLibrary> library,
                                                bool deterministic = false);

}  // namespace gyre
