#pragma once
// Attention on a GPU: tiles of CUDA C++ (cuda_tiles.hpp, cuda_forward.cu, cuda_query_gradients.cu,
// cuda_key_gradients.cu) that take any list of rectangles.

#include <cstdint>
#include <memory>

#include "attention/kernels/block_kernel.hpp"
#include "runtime/stream.hpp"

namespace gyre {

inline constexpr int64_t cuda_kernel_largest_head_dim = 256;

/// A kernel whose calls are submitted to `stream`, a CUDA stream that must outlive it; arrays lie
/// in device memory, rectangles on the host, where they may change after the call. Nothing waits,
/// but a list of rectangles that was not among the last 256 is uploaded. The same call gives the
/// same bits from run to run.
///
/// bf16 arrays go through tensor cores, with softmax weights and their gradients rounded to bf16 in
/// between; f32 arrays through f32 FMA. With fixed tiles, (O, LSE) and dQ, dK, dV are stored after
/// every rectangle and read again, as if each had a call of its own.
///
/// A value of NaN or infinity in keys or values, or in queries and gradients of the backward pass,
/// reaches the results of up to 63 rows that lie around those that see it, though they may be of
/// another document.
///
/// Usage errors: a head_dim of 0 or above 256, a scale that is not positive, arrays of other types
/// than f32 and bf16, or of two types. `progress` is called once in a call.
///
/// `sm_bytes`: tiles are chosen as for a device with so much shared memory an SM (cuda_shapes.hpp);
/// 0: for the stream's. Throws a runtime error in a build without CUDA.
std::unique_ptr<BlockKernel> make_cuda_kernel(Stream& stream, int64_t sm_bytes = 0);

}  // namespace gyre
