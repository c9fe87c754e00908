#pragma once
// Attention on a GPU by tiled CUDA C++ kernels (cuda_tiles.hpp, cuda_forward.cu,
// cuda_query_gradients.cu, cuda_key_gradients.cu), for any list of rectangles.

#include <cstdint>
#include <memory>

#include "attention/kernels/block_kernel.hpp"
#include "runtime/stream.hpp"

namespace gyre {

inline constexpr int64_t cuda_kernel_largest_head_dim = 256;

/// A kernel whose calls are submitted to `stream`, a CUDA stream that must outlive it. Arrays lie
/// in device memory; rectangles lie on the host and may change after the call. A call uploads its
/// list of rectangles if it is not among the last 256, and waits for the stream only to drop an
/// older list. Equal calls give equal bits in every run.
///
/// bf16 arrays use tensor cores; softmax weights and their gradients are rounded to bf16 in
/// between. f32 arrays use f32 FMA. With fixed tiles, (O, LSE) and dQ, dK, dV are stored after
/// every rectangle and read again, as if each had its own call.
///
/// NaN or infinity in keys or values, or in queries and gradients of the backward pass, can reach
/// the results of up to 63 rows next to the rows that see it, even of another document.
///
/// Calls throw a usage error for a head_dim of 0 or above 256, a scale that is not positive, and
/// types of arrays other than f32 and bf16 or that differ. They call `progress` once.
///
/// `sm_bytes`: shared memory per SM for which tiles are chosen (cuda_shapes.hpp); 0: that of the
/// stream's device. Throws a runtime error in a build without CUDA.
std::unique_ptr<BlockKernel> make_cuda_kernel(Stream& stream, int64_t sm_bytes = 0);

}  // namespace gyre
