#pragma once
// What the operations of gyre-logprobs compute and communicate with, on the host or on GPUs.

#include <memory>

#include "apps/common/backend.hpp"
#include "comm/process_grid.hpp"
#include "logprobs/fused_linear_ops.hpp"
#include "logprobs/row_kernels.hpp"

namespace gyre {

class LogprobsBackend {
 public:
  /// The host and one grid for everything.
  explicit LogprobsBackend(ProcessGrid& grid)
      : grid_(grid),
        arrays_(grid),
        stream_(host_),
        row_kernels_(make_row_kernels(stream_)),
        linear_ops_(make_linear_ops(stream_, *row_kernels_)) {}
  /// That of the options. Collective over all ranks.
  LogprobsBackend(Backend& backend, const GridShape& shape);

  /// Where logits, gradients, hidden states and weights lie.
  MemorySpace space() const { return stream_.space(); }
  /// In whose order they are read and written.
  Stream& stream() { return stream_; }
  /// Groups of ranks for what there is a little of a row: host memory.
  ProcessGrid& grid() { return grid_; }
  /// The same groups for what is as large as logits or hidden states: memory of space().
  ProcessGrid& arrays() { return arrays_; }
  /// Backend::check_messages; nothing without one.
  void check_messages(bool on) {
    if (backend_ != nullptr) backend_->check_messages(on);
  }
  RowKernels* row_kernels() { return row_kernels_.get(); }
  LinearOps* linear_ops() { return linear_ops_.get(); }

 private:
  Backend* backend_ = nullptr;
  HostStream host_;
  std::unique_ptr<ProcessGrid> own_grid_, own_arrays_;
  ProcessGrid& grid_;
  ProcessGrid& arrays_;
  Stream& stream_;
  std::unique_ptr<RowKernels> row_kernels_;
  std::unique_ptr<LinearOps> linear_ops_;
};

}  // namespace gyre
