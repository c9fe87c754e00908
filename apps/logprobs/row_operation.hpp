#pragma once
// The operations on rows (logprobs/operations/) as entries of gyre-logprobs.

#include <vector>

#include "apps/logprobs/operation.hpp"

namespace gyre {

/// An entry for each operation on rows, with NeMo RL's algorithm where it has one.
std::vector<LogprobsOperation> row_operation_entries();

}  // namespace gyre
