#include "apps/logprobs/registry.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "apps/logprobs/row_operation.hpp"

// The operations with passes of their own, one line each. NAME_operation() in ops/ returns the
// entry. Those on rows, which logprobs/operations/ lists, stand before them in the table.
#define GYRE_LOGPROBS_OPERATIONS(X) \
  X(log_softmax)                    \
  X(softmax)                        \
  X(soft_cross_entropy)             \
  X(project)                        \
  X(topk_kl)                        \
  X(topk_kl_advantage)              \
  X(top_k)                          \
  X(argmax)                         \
  X(filtered)                       \
  X(kept)                           \
  X(exchange)                       \
  X(fused_linear)                   \
  X(packed)                         \
  X(packed_prerolled)               \
  X(packed_filtered)                \
  X(rollouts)

namespace gyre {

#define GYRE_DECLARE(name) LogprobsOperation name##_operation();
GYRE_LOGPROBS_OPERATIONS(GYRE_DECLARE)
#undef GYRE_DECLARE

const std::vector<LogprobsOperation>& logprobs_operations() {
#define GYRE_ENTRY(name) name##_operation(),
  static const std::vector<LogprobsOperation> all = [] {
    std::vector<LogprobsOperation> entries = row_operation_entries();
    for (const LogprobsOperation& own : {GYRE_LOGPROBS_OPERATIONS(GYRE_ENTRY)})
      entries.push_back(own);
    return entries;
  }();
#undef GYRE_ENTRY
  return all;
}

const std::vector<LogprobsArray>& logprobs_arrays() {
  static const std::vector<LogprobsArray> all = [] {
    std::vector<LogprobsArray> arrays;
    for (const LogprobsOperation& operation : logprobs_operations())
      for (const LogprobsArray& array : operation.arrays)
        if (std::ranges::find(arrays, array.name, &LogprobsArray::name) == arrays.end())
          arrays.push_back(array);
    return arrays;
  }();
  return all;
}

const LogprobsArray& find_array(const std::string& name) {
  const auto found = std::ranges::find(logprobs_arrays(), name, &LogprobsArray::name);
  GYRE_CHECK(found != logprobs_arrays().end(), "no operation has the array {}", name);
  return *found;
}

const LogprobsOperation& find_operation(const std::string& name) {
  std::vector<std::string> names;
  for (const LogprobsOperation& operation : logprobs_operations()) {
    if (operation.name == name) return operation;
    names.push_back(operation.name);
  }
  throw_usage("operation '{}' is none of {}", name, fmt::join(names, ", "));
}

}  // namespace gyre
