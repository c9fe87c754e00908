#pragma once
// The fused linear layer's products and moves on a device.

#include <memory>

#include "logprobs/fused_linear_ops.hpp"

namespace gyre {

/// 64 MiB of f32 logits: products of such tiles use all of a large device, and take long against
/// what surrounds them. Not measured.
inline constexpr TileSize usual_cuda_tile{2048, 8192};

/// On `stream`, a CUDA stream, with row passes by `kernels`, which are of the same stream; both
/// must outlive them. Products of bf16 with bf16 are those of the matrix units, with f32 sums, and
/// gradients of logits are rounded to bf16 for them: gradients of X and the weight are as exact as
/// those of logits that are stored in bf16. Where X or the weight is f32, all products are f32's.
///
/// Throws a runtime error in a build without CUDA.
///
/// Limit: the products (cuda_gemm.hpp). Row passes read a tile of f32 logits, forward once, and
/// backward once, writing 2 bytes an element (4 if all is f32): per logit 4 + 6 bytes of memory
/// against 8 D FLOPs, which is 1 to 10 at D = 2048 on a device of 3 TB/s and 500 TFLOP/s.
std::unique_ptr<LinearOps> make_cuda_linear_ops(Stream& stream, RowKernels& kernels);

}  // namespace gyre
