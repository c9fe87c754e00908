#pragma once
// A kernel out of a library's fused attention.
//
//     forward    rectangles -> batches of sequences (ragged_batch.hpp), at most a few
//                each batch -> library -> (O, LSE) of its entries, in scratch rows
//                scratch rows merged into the running (O, LSE) (cuda_merge.hpp)
//     backward   O' with <O', dO> = delta, and the LSE, of all rows that entries touch
//                each batch -> library -> dQ, dK, dV of its entries in bf16 -> added to the sums
//
// A library's backward pass is that of a whole softmax, p = exp(x - LSE), dS = p (dP - <O, dO>).
// Given the LSE of the whole row, and of O what matters of it, it is right for a part of the keys,
// too.
//
// That is shorter for results that are fresh, and where O itself is at hand (block_kernel.hpp).
// Scratch rows of a batch that is the first to write its rows replace what is there. A first batch
// that has every row of O, or is even, needs none: it writes O and LSE, or dQ, where they belong,
// if O, or dQ, is in bf16 and 16-byte aligned. And it reads O and LSE where they are, if O is in
// bf16 and aligned.
//
// Even batches (ragged_batch.hpp) of long entries go to graphs without tables, for which libraries
// have faster engines.
//
// What the library does not take goes to the tiled kernel (cuda_kernel.hpp), call by call (f32
// arrays, head_dim not a multiple of 16 or too large for the device, some heads of a group, rows
// that are not 16-byte aligned) or rectangle by rectangle (windows behind a diagonal or without
// one, fixed tiles, unequal strides), or batch by batch, when the library has no engine for it;
// note() counts them.
//
// Limit: the FLOPs of the visible pairs over the tensor cores' peak, as far as the library comes.
// On top of that come the bytes of what is merged and added, over the memory bandwidth: forward 6
// to 10 bytes for each element of out, backward 14 for each of dQ and 10 for each of dK and dV. Of
// fresh results, forward 0 (in place) or 6, backward 0 (in place, with O) to 10 for each of dQ and
// 6 for each of dK and dV. With as many heads of queries as of keys, a ragged batch costs 4 more
// backward for each of K and V, which are gathered (attention_library.hpp). For a causal sequence
// of S tokens that is to be seen beside 2 S FLOPs forward, 5 S backward, for each element of out.

#include <memory>

#include "attention/kernels/attention_library.hpp"
#include "attention/kernels/block_kernel.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// A backward graph that gives the same bits in every run is taken if its workspace, bytes, is not
/// larger than this, or than that of any graph by more than this.
inline constexpr int64_t most_ordered_workspace = int64_t{1} << 30;

/// A kernel whose calls are submitted to `stream`, a CUDA stream that must outlive it; arrays lie
/// in device memory, rectangles on the host, where they may change after the call. The first call
/// of a shape builds a graph; shapes are rounded up to powers of two, so that there are few. The
/// backward pass gives the same bits in every run where the library offers that at a moderate cost;
/// note() says when it was not so. `deterministic`: at any cost; what the library has no fixed
/// order for goes to the tiled kernel, and a workspace that does not fit is a runtime error that
/// names its bytes.
std::unique_ptr<BlockKernel> make_ragged_kernel(Stream& stream,
                                                std::unique_ptr<AttentionLibrary> library,
                                                bool deterministic = false);

}  // namespace gyre
