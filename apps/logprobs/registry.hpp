#pragma once
// All operations of gyre-logprobs.

#include <string>
#include <vector>

#include "apps/logprobs/operation.hpp"

namespace gyre {

/// All operations, in the order of the table.
const std::vector<LogprobsOperation>& logprobs_operations();
/// The arrays of all operations, without duplicates.
const std::vector<LogprobsArray>& logprobs_arrays();
const LogprobsArray& find_array(const std::string& name);
/// The operation `name`. Throws a usage error that lists the names if there is none.
const LogprobsOperation& find_operation(const std::string& name);

}  // namespace gyre
