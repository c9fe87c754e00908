#pragma once
// Gradients of encodings that ranks compute together, for each convention.

#include <vector>

#include "report/verify.hpp"

namespace gyre {

/// Checks the gradients that a rank's encoder gets from gradients of all encodings `frames`
/// [items][frames, hidden]. For the items that the rank encoded they must be the sum over ranks
/// (GatherGradient::sum), the rank's own (split), or zero (none). Collective.
void check_encoder_gradients(const std::vector<std::vector<float>>& frames, Communicator& world,
                             Verification& checks);

}  // namespace gyre
