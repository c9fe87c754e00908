#include "attention/kernels/make_kernel.hpp"

#include "attention/kernels/cuda_kernel.hpp"
#include "attention/kernels/cudnn_kernel.hpp"
#include "core/error.hpp"

namespace gyre {

std::string kernel_name(const KernelChoice& choice, MemorySpace space) {
  if (space == MemorySpace::host) return "cpu";
  if (choice.name != "auto") return choice.name;
  return choice.activations == DType::bf16 && !cudnn_version().empty() ? "cudnn" : "tiled";
}

std::unique_ptr<BlockKernel> make_block_kernel(Stream& stream, const KernelChoice& choice) {
  const std::string name = kernel_name(choice, stream.space());
  if (name == "cpu") return make_cpu_kernel(choice.threads);
  if (name == "tiled") return make_cuda_kernel(stream);
  if (name == "cudnn") return make_cudnn_kernel(stream);
  throw_usage("attention kernel {}; there are auto, tiled and cudnn", name);
}

}  // namespace gyre
