#pragma once
// Device products and row moves of the fused linear layer.

#include <memory>

#include "logprobs/fused_linear/fused_linear_ops.hpp"

namespace gyre {

/// Creates operations on the CUDA stream `stream`, with row passes by `kernels` on the same stream;
/// both must outlive them. If X and the weight are bf16, products use the tensor cores with f32
/// sums, and gradients of logits are rounded to bf16: gradients of X and the weight are as exact as
/// with logits stored in bf16. If X or the weight is f32, all products are f32.
///
/// Throws a runtime error in a build without CUDA.
///
/// The products (cuda_gemm.hpp) bound the time: 8 D FLOPs per logit. Row passes read 4 bytes per
/// logit in forward; in backward they read 4 and write 2 (4 if all is f32). At D = 2048 these 10
/// bytes take a tenth of the time of the products on a device with 3 TB/s and 500 TFLOP/s.
std::unique_ptr<LinearOps> make_cuda_linear_ops(Stream& stream, RowKernels& kernels);

}  // namespace gyre
