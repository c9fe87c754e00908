#pragma once

#include <cstdint>

namespace gyre {

/// Label of a slot that the loss ignores (the default ignore_index of PyTorch's cross entropy).
inline constexpr int32_t ignored_label = -100;

}  // namespace gyre
