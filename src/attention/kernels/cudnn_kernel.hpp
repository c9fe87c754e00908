#pragma once
// Attention by cuDNN's fused kernels, through the ragged kernel (cuda_ragged_kernel.hpp). Building
// needs CUDA, cuDNN's headers and its C++ front end; the library itself is loaded on first use.

#include <memory>
#include <string>

#include "attention/kernels/block_kernel.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// "9.19.0" if cuDNN can be loaded; else empty, and `why` says what is missing.
std::string cudnn_version(std::string* why = nullptr);

/// A kernel whose calls are submitted to `stream`, a CUDA stream that must outlive it. The first
/// call of a shape builds a graph, which takes about a second. `deterministic`: see
/// make_ragged_kernel().
///
/// Throws a runtime error when the build has no cuDNN, when cuDNN cannot be loaded, or when it does
/// not start on the current device.
std::unique_ptr<BlockKernel> make_cudnn_kernel(Stream& stream, bool deterministic = false);

}  // namespace gyre
