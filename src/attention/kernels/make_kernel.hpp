#pragma once
// Makes the block kernel of a run, by name and by the memory space of its arrays.
//
//     host      cpu, for any name
//     device    tiled: the tiled kernel of cuda_kernel.hpp
//               cudnn: cudnn_kernel.hpp
//               auto:  cudnn for bf16 where the library can be loaded, else tiled

#include <memory>
#include <string>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "runtime/stream.hpp"

namespace gyre {

struct KernelChoice {
  std::string name = "auto";       ///< auto, tiled or cudnn
  DType activations = DType::f32;  ///< type of queries, keys and values
  int threads = 1;                 ///< threads of the CPU kernel
  /// Equal bits in every run, at any cost. Only affects cudnn: see make_ragged_kernel().
  bool deterministic = false;
};

/// A kernel, and whether this build has it.
struct KernelKind {
  std::string name;
  MemorySpace space;  ///< of its arrays
  bool built;         ///< this build has it
};
const std::vector<KernelKind>& kernel_kinds();

/// Valid values of KernelChoice::name: auto, and the kernels of devices.
std::vector<std::string> kernel_choices();

/// "cpu", "tiled" or "cudnn": the kernel that the choice selects for arrays in `space`.
std::string kernel_name(const KernelChoice& choice, MemorySpace space);

/// Makes the kernel of kernel_name() on `stream`, which must outlive it. Throws a runtime error
/// when this build or machine lacks what the kernel needs, and a usage error for an unknown name.
std::unique_ptr<BlockKernel> make_block_kernel(Stream& stream, const KernelChoice& choice);

}  // namespace gyre
