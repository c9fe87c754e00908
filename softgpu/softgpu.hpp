#pragma once
// The inside of the software GPU: how launches are run.

#include <functional>
#include <string>

#include "cuda_runtime.h"

namespace softgpu {

/// In which order the threads of a block, and its blocks, take their turns. A kernel without races
/// gives the same result in both.
enum class LaneOrder { forward, reverse };

/// Runs all blocks of a launch, one after the other.
void run_grid(const LaunchShape& shape, const std::function<void()>& body, LaneOrder order);

/// Ends the program: a kernel or a call is wrong in a way that a GPU would not survive either.
[[noreturn]] void die(const std::string& why);

}  // namespace softgpu
