#pragma once
// The block kernel of a run, chosen by name and by where its arrays lie.
//
//     host      cpu, whatever the name
//     device    tiled: the tiles of cuda_kernel.hpp
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
  DType activations = DType::f32;  ///< of queries, keys and values
  int threads = 1;                 ///< of the host's kernel
  /// The same bits in every run, at any cost. Only cudnn makes a difference: see
  /// make_ragged_kernel().
  bool deterministic = false;
};

/// A kernel that a build may have.
struct KernelKind {
  std::string name;
  MemorySpace space;  ///< of its arrays
  bool built;         ///< this build has it
};
const std::vector<KernelKind>& kernel_kinds();

/// What KernelChoice::name may be: auto, and the kernels of devices.
std::vector<std::string> kernel_choices();

/// "cpu", "tiled" or "cudnn": what the choice comes to for arrays in `space`.
std::string kernel_name(const KernelChoice& choice, MemorySpace space);

/// That kernel, on `stream`, which must outlive it. Throws a runtime error when this build, or this
/// machine, lacks what the kernel needs, and a usage error for another name.
std::unique_ptr<BlockKernel> make_block_kernel(Stream& stream, const KernelChoice& choice);

}  // namespace gyre
