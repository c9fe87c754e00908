#pragma once
// What the kernel around a library's attention asks the library for: the graphs of a batch, by
// where its results go.

#include "attention/kernels/attention_library.hpp"
#include "attention/kernels/block_kernel.hpp"
#include "attention/kernels/cuda_ragged_tables.hpp"
#include "core/matrix_ref.hpp"

namespace gyre {

/// Why the library takes no part of a call; nullptr when it may.
const char* unfit(const BlockInput& block, ConstMatrixRef d_out);

/// Whether the library may use an array of the caller's as it is.
bool usable(ConstMatrixRef m, DType type);

/// Of a ragged batch, forward, with results in scratch rows.
AttentionGraphShape ragged_shape(const BlockInput& block, const ReadyBatch& ready);
/// The same of a batch that is even.
AttentionGraphShape even_shape(const BlockInput& block, const ReadyBatch& ready);

/// Arrays of the caller's that a backward graph uses as they are; `out` with its log-sum-exps.
struct DirectArrays {
  bool out = false, d_q = false;
};
DirectArrays direct_arrays(const BackwardBlock& block, const ReadyBatch& ready);

/// Whether the library's d_k and d_v lie as its k and v do (attention_library.hpp): it is then
/// given copies of these, in scratch rows.
bool gathers_keys(const BlockInput& block);
AttentionGraphShape ragged_gradient_shape(const BackwardBlock& block, const ReadyBatch& ready,
                                          DirectArrays direct);
/// O, or its stand-in, has a row for each query.
AttentionGraphShape even_gradient_shape(const BackwardBlock& block, const ReadyBatch& ready,
                                        DirectArrays direct);

}  // namespace gyre
