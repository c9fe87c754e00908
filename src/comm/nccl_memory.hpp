#pragma once
// Memory of NCCL's, and windows on it. For nccl*.cpp.

#include <functional>
#include <memory>
#include <span>

#include "comm/nccl_channel.hpp"

namespace gyre {

/// A symmetric window (NCCL 2.27) of the communicator on `memory`, as long as the result lives;
/// nullptr on all ranks where one of them cannot have it: another size, memory that is not the
/// beginning of a block of ncclMemAlloc. `least`: the least of what all ranks say. Collective.
std::shared_ptr<void> register_nccl_window(const std::shared_ptr<Channel>& channel,
                                           std::span<std::byte> memory,
                                           const std::function<int64_t(int64_t)>& least);

}  // namespace gyre
