#pragma once
// The directions of a computation: forward, or backward for its gradients.

namespace gyre {

enum class Pass { forward, backward };
constexpr const char* name_of(Pass pass) {
  return pass == Pass::forward ? "fwd" : "bwd";
}

}  // namespace gyre
