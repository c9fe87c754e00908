#pragma once
// The gradient of encodings whose work ranks share, by each convention.

#include <vector>

#include "report/verify.hpp"

namespace gyre {

/// Adds to `checks`: what the encoder of a rank gets for gradients of all encodings `frames`
/// [items][frames, hidden] is, for the items that the rank encoded, the sum over ranks
/// (GatherGradient::sum), the rank's own (split), or zero (none). Collective.
void check_encoder_gradients(const std::vector<std::vector<float>>& frames, Communicator& world,
                             Verification& checks);

}  // namespace gyre
