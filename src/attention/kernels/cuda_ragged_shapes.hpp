#pragma once
// Graph shapes that the ragged kernel requests from the library for a batch, by destination of its
// results.

#include "attention/kernels/attention_library.hpp"
#include "attention/kernels/block_kernel.hpp"
#include "attention/kernels/cuda_ragged_tables.hpp"
#include "core/matrix_ref.hpp"

namespace gyre {

/// Why the library can compute no part of a call; nullptr if it may.
const char* unsupported_reason(const BlockInput& block, ConstMatrixRef d_out);

/// Whether the library may access an array of the caller directly.
bool usable(ConstMatrixRef m, DType type);

/// Shape of a ragged batch, forward, with results in scratch rows.
AttentionGraphShape ragged_shape(const BlockInput& block, const PreparedBatch& ready);
/// Shape of an even batch, forward.
AttentionGraphShape even_shape(const BlockInput& block, const PreparedBatch& ready);

/// Arrays of the caller that a backward graph accesses directly; `out` includes its log-sum-exps.
struct DirectArrays {
  bool out = false, d_q = false;
};
DirectArrays direct_arrays(const BackwardBlock& block, const PreparedBatch& ready);

/// Whether the library's d_k and d_v have the layout of its k and v (attention_library.hpp), so
/// that it needs copies of these in scratch rows.
bool gathers_keys(const BlockInput& block);
AttentionGraphShape ragged_gradient_shape(const BackwardBlock& block, const PreparedBatch& ready,
                                          DirectArrays direct);
/// O, or its stand-in, has one row per query.
AttentionGraphShape even_gradient_shape(const BackwardBlock& block, const PreparedBatch& ready,
                                        DirectArrays direct);

}  // namespace gyre
