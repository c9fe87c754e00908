#pragma once
// Device products and row moves of the fused linear layer.

#include <memory>

#include "logprobs/fused_linear_ops.hpp"

namespace gyre {

/// 64 MiB of f32 logits: products of such tiles fill a large device and outweigh their overhead.
/// Not measured.
inline constexpr TileSize usual_cuda_tile{2048, 8192};

/// Creates operations on the CUDA stream `stream`, with row passes by `kernels` on the same stream;
/// both must outlive them. Products of bf16 with bf16 use the tensor cores with f32 sums, for which
/// gradients of logits are rounded to bf16: gradients of X and the weight are as exact as with
/// logits stored in bf16. If X or the weight is f32, all products are f32.
///
/// Throws a runtime error in a build without CUDA.
///
/// Bound: the products (cuda_gemm.hpp). Row passes read a tile of f32 logits once in forward and
/// once in backward, where they write 2 bytes per element (4 if all is f32): 4 + 6 bytes per logit
/// against 8 D FLOPs, a time ratio of 1 to 10 at D = 2048 on a device with 3 TB/s and 500 TFLOP/s.
std::unique_ptr<LinearOps> make_cuda_linear_ops(Stream& stream, RowKernels& kernels);

}  // namespace gyre
