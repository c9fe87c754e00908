#pragma once
// The decoder's operations on a device. Built where CUDA is, or the software GPU.

#include <memory>

#include "model/decoder_ops.hpp"

namespace gyre {

/// Kernels on `stream`, a CUDA stream.
std::unique_ptr<DecoderOps> make_cuda_decoder_ops(Stream& stream);

}  // namespace gyre
