#pragma once
// Memory allocated by NCCL, and windows on it. For nccl*.cpp.

#include <functional>
#include <memory>
#include <span>

#include "comm/nccl_channel.hpp"

namespace gyre {

/// Registers a symmetric window (NCCL 2.27) of the communicator on `memory`, valid while the result
/// lives. Returns nullptr on all ranks if one has another size or `memory` is not the beginning of
/// a block of ncclMemAlloc. `least` returns the minimum over all ranks. Collective.
std::shared_ptr<void> register_nccl_window(const std::shared_ptr<Channel>& channel,
                                           std::span<std::byte> memory,
                                           const std::function<int64_t(int64_t)>& least);

}  // namespace gyre
