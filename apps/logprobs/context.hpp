#pragma once
// What the operations of one run of gyre-logprobs share: inputs, options, ranks and rows.

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "apps/logprobs/backend.hpp"
#include "apps/logprobs/rows.hpp"

namespace gyre {

/// What the operations of one case share.
class LogprobsContext {
 public:
  LogprobsContext(const LogprobsWorkload& problem_, const LogprobsInputs& inputs_,
                  const LogprobsOptions& options_, LogprobsBackend& backend_)
      : problem(problem_),
        inputs(inputs_),
        options(options_),
        backend(backend_),
        grid(backend_.grid()) {}

  const LogprobsWorkload& problem;
  const LogprobsInputs& inputs;
  const LogprobsOptions& options;
  LogprobsBackend& backend;
  ProcessGrid& grid;                    ///< the backend's, of host memory
  std::set<std::string> compared = {};  ///< arrays of answers that results were compared with

  /// Tokens of this rank when they are dealt in order, as evenly as can be, over context-parallel
  /// ranks.
  std::vector<int64_t> tokens_in_order() const;
  /// Their rows.
  LogprobsRows& in_order();
  /// Rows under --layout, for packed sequences; made anew, and takes the place of the other.
  LogprobsRows& by_layout(std::vector<int64_t> tokens);
  /// Gives the memory of rows back.
  void release() { rows_ = nullptr; }

 private:
  std::unique_ptr<LogprobsRows> rows_;
  bool ordered_ = false;
};

}  // namespace gyre
