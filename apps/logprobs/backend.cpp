#include "apps/logprobs/backend.hpp"

namespace gyre {

LogprobsBackend::LogprobsBackend(Backend& backend, const GridShape& shape)
    : backend_(&backend),
      own_grid_(std::make_unique<ProcessGrid>(backend.host_staging(), shape)),
      own_arrays_(backend.on_gpu() ? std::make_unique<ProcessGrid>(backend.world(), shape)
                                   : nullptr),
      grid_(*own_grid_),
      arrays_(backend.on_gpu() ? *own_arrays_ : *own_grid_),
      stream_(backend.stream()),
      row_kernels_(make_row_kernels(stream_)),
      linear_ops_(make_linear_ops(stream_, *row_kernels_)) {}

}  // namespace gyre
