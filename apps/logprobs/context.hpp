#pragma once
// State that the cases of one run of gyre-logprobs share: inputs, options, process grids, rows,
// and compute and communication backends.

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
  /// Computes on the host and uses one grid for all communication.
  explicit LogprobsBackend(ProcessGrid& grid);
  /// Computes on `backend`. Collective over all ranks.
  LogprobsBackend(Backend& backend, const GridShape& shape);

  /// Memory space of logits, gradients, hidden states and weights.
  MemorySpace space() const { return stream_.space(); }
  /// Stream that orders all reads and writes of these arrays.
  Stream& stream() { return stream_; }
  /// Process grid for the few numbers of each row, in host memory.
  ProcessGrid& grid() { return grid_; }
  /// The same grid for arrays as large as logits or hidden states, in memory of space().
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
  ProcessGrid& grid;                    ///< backend.grid(), for host memory
  std::set<std::string> compared = {};  ///< answer arrays that results were compared with

  /// Tokens of this rank when context-parallel ranks get contiguous, balanced blocks of them.
  std::vector<int64_t> tokens_in_order() const;
  /// Rows of tokens_in_order(), with the logits restored.
  LogprobsRows& in_order();
  /// Rows under --layout, for packed sequences. Rebuilds them and replaces the current rows.
  LogprobsRows& by_layout(std::vector<int64_t> tokens);
  /// Frees the memory of the rows.
  void release() { rows_ = nullptr; }

 private:
  std::unique_ptr<LogprobsRows> rows_;
  bool ordered_ = false;
};

}  // namespace gyre
