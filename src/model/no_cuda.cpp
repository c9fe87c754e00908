// The decoder's operations in a build without CUDA.

#include "core/error.hpp"
#include "model/cuda_decoder_ops.hpp"

namespace gyre {

std::unique_ptr<DecoderOps> make_cuda_decoder_ops(Stream& /*stream*/) {
  throw_runtime("a decoder on a GPU: this build has no CUDA");
}

}  // namespace gyre
