#pragma once
// What the cases of one run of gyre-logprobs share: inputs, options, ranks, rows, and what they
// compute and communicate with.

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "apps/logprobs/rows.hpp"
#include "comm/process_grid.hpp"
#include "harness/backend.hpp"
#include "logprobs/fused_linear_ops.hpp"
#include "logprobs/row_kernels.hpp"

namespace gyre {

class LogprobsBackend {
 public:
  /// The host, and one grid for everything.
  explicit LogprobsBackend(ProcessGrid& grid);
  /// A backend of the options. Collective over all ranks.
  LogprobsBackend(Backend& backend, const GridShape& shape);

  /// Memory space of logits, gradients, hidden states and weights.
  MemorySpace space() const { return stream_.space(); }
  /// They are read and written in its order.
  Stream& stream() { return stream_; }
  /// Groups of ranks for the few numbers of a row: host memory.
  ProcessGrid& grid() { return grid_; }
  /// The same groups for arrays as large as logits or hidden states: memory of space().
  ProcessGrid& arrays() { return arrays_; }
  RowKernels* row_kernels() { return row_kernels_.get(); }
  LinearOps* linear_ops() { return linear_ops_.get(); }

 private:
  HostStream host_;
  std::unique_ptr<ProcessGrid> own_grid_, own_arrays_;
  ProcessGrid& grid_;
  ProcessGrid& arrays_;
  Stream& stream_;
  std::unique_ptr<RowKernels> row_kernels_;
  std::unique_ptr<LinearOps> linear_ops_;
};

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
