#pragma once

#include <cstdint>

namespace gyre {

/// The label of a slot that no loss counts, as PyTorch's cross entropy has it.
inline constexpr int32_t ignored_label = -100;

}  // namespace gyre
