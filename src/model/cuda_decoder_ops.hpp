#pragma once
// The decoder's operations on a device.

#include <memory>

#include "model/decoder_ops.hpp"

namespace gyre {

/// Kernels on `stream`, a CUDA stream, which must outlive them. Throws a runtime error in a build
/// without CUDA.
std::unique_ptr<DecoderOps> make_cuda_decoder_ops(Stream& stream);

}  // namespace gyre
