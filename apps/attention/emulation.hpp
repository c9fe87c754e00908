#pragma once
// The network and the kernel of a run: the real ones, or those of --emulate-network and
// --emulate-compute.

#include <memory>

#include "apps/attention/options.hpp"
#include "attention/kernels/block_kernel.hpp"

namespace gyre {

/// Whether --emulate-compute names the file of a machine (gyre-machine/1), not settings.
inline bool names_machine(const std::string& compute) {
  return compute.find('=') == std::string::npos;
}

struct NetworkAndKernel {
  std::unique_ptr<Communicator> emulated_network;  ///< null: there is none
  Communicator& network;                           ///< the emulated one, or the backend's
  std::unique_ptr<BlockKernel> kernel;
};

/// Makes network and kernel. With --emulate-compute, waits of the network and of context.world
/// sleep from now on. Collective.
NetworkAndKernel make_network_and_kernel(AppContext& context, const AttentionOptions& o,
                                         Backend& backend);

}  // namespace gyre
