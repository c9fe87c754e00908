#include "attention/kernels/make_kernel.hpp"

#include <fmt/ranges.h>

#include "attention/kernels/cuda_kernel.hpp"
#include "attention/kernels/cudnn_kernel.hpp"
#include "core/error.hpp"
#include "runtime/features.hpp"

namespace gyre {

const std::vector<KernelKind>& kernel_kinds() {
  static const std::vector<KernelKind> kinds = {{"cpu", MemorySpace::host, true},
                                                {"tiled", MemorySpace::device, with_cuda},
                                                {"cudnn", MemorySpace::device, with_cudnn}};
  return kinds;
}

std::vector<std::string> kernel_choices() {
  std::vector<std::string> names = {"auto"};
  for (const KernelKind& kind : kernel_kinds())
    if (kind.space == MemorySpace::device) names.push_back(kind.name);
  return names;
}

std::string kernel_name(const KernelChoice& choice, MemorySpace space) {
  if (space == MemorySpace::host) return "cpu";
  if (choice.name != "auto") return choice.name;
  return choice.activations == DType::bf16 && !cudnn_version().empty() ? "cudnn" : "tiled";
}

std::unique_ptr<BlockKernel> make_block_kernel(Stream& stream, const KernelChoice& choice) {
  const std::string name = kernel_name(choice, stream.space());
  if (name == "cpu") return make_cpu_kernel(choice.threads);
  if (name == "tiled") return make_cuda_kernel(stream);
  if (name == "cudnn") return make_cudnn_kernel(stream, choice.deterministic);
  throw_usage("attention kernel {}; there are {}", name, fmt::join(kernel_choices(), ", "));
}

}  // namespace gyre
