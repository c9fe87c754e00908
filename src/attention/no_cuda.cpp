// Stubs of attention on a device for builds without CUDA.

#include "attention/kernels/cuda_kernel.hpp"
#include "core/error.hpp"

namespace gyre {

std::unique_ptr<BlockKernel> make_cuda_kernel(Stream& /*stream*/, int64_t /*sm_bytes*/) {
  throw_runtime("attention kernel tiled: this build has no CUDA");
}

}  // namespace gyre
