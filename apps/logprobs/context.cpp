#include "apps/logprobs/context.hpp"

#include <utility>

namespace gyre {

LogprobsBackend::LogprobsBackend(ProcessGrid& grid)
    : grid_(grid),
      arrays_(grid),
      stream_(host_),
      row_kernels_(make_row_kernels(stream_)),
      linear_ops_(make_linear_ops(stream_, *row_kernels_)) {}

LogprobsBackend::LogprobsBackend(Backend& backend, const GridShape& shape)
    : own_grid_(std::make_unique<ProcessGrid>(backend.host_staging(), shape)),
      own_arrays_(backend.on_gpu() ? std::make_unique<ProcessGrid>(backend.world(), shape)
                                   : nullptr),
      grid_(*own_grid_),
      arrays_(backend.on_gpu() ? *own_arrays_ : *own_grid_),
      stream_(backend.stream()),
      row_kernels_(make_row_kernels(stream_)),
      linear_ops_(make_linear_ops(stream_, *row_kernels_)) {}

std::vector<int64_t> LogprobsContext::tokens_in_order() const {
  const int64_t cp = grid.shape().cp, rank = grid.cp_rank(), tokens = problem.tokens();
  std::vector<int64_t> own;
  for (int64_t t = tokens * rank / cp; t < tokens * (rank + 1) / cp; ++t) own.push_back(t);
  return own;
}

LogprobsRows& LogprobsContext::in_order() {
  if (!rows_ || !ordered_) {
    rows_ = nullptr;  // free the old rows before the new ones are allocated
    rows_ = std::make_unique<LogprobsRows>(problem, inputs, tokens_in_order(), grid.tp_rank(),
                                           options.in_place, backend.stream());
    ordered_ = true;
  }
  rows_->restore();
  return *rows_;
}

LogprobsRows& LogprobsContext::by_layout(std::vector<int64_t> tokens) {
  rows_ = nullptr;
  rows_ = std::make_unique<LogprobsRows>(problem, inputs, std::move(tokens), grid.tp_rank(),
                                         options.in_place, backend.stream());
  ordered_ = false;
  return *rows_;
}

}  // namespace gyre
