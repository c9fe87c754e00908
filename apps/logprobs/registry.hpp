#pragma once
// All operations of gyre-logprobs.

#include <string>
#include <vector>

#include "apps/logprobs/operation.hpp"

namespace gyre {

/// In the order of the table.
const std::vector<LogprobsOperation>& logprobs_operations();
/// The arrays of all of them, each once.
const std::vector<LogprobsArray>& logprobs_arrays();
const LogprobsArray& find_array(const std::string& name);
/// Throws a usage error that lists the names.
const LogprobsOperation& find_operation(const std::string& name);

}  // namespace gyre
