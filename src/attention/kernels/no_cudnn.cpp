// Stub of cuDNN for builds without it.

#include "attention/kernels/cudnn_kernel.hpp"
#include "core/error.hpp"

namespace gyre {

std::string cudnn_version(std::string* why) {
  if (why != nullptr) *why = "this build has no cuDNN";
  return "";
}

std::unique_ptr<BlockKernel> make_cudnn_kernel(Stream& /*stream*/, bool /*deterministic*/) {
  throw_runtime("attention kernel cudnn: this build has no cuDNN");
}

}  // namespace gyre
