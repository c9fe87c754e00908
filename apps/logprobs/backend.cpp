#include "apps/logprobs/backend.hpp"

#include "logprobs/cuda_row_kernels.hpp"
#include "logprobs/fused_linear_cuda.hpp"

namespace gyre {

LogprobsBackend::LogprobsBackend(Backend& backend, const GridShape& shape)
    : own_grid_(std::make_unique<ProcessGrid>(backend.host_staging(), shape)),
      own_arrays_(backend.on_gpu() ? std::make_unique<ProcessGrid>(backend.world(), shape)
                                   : nullptr),
      grid_(*own_grid_),
      arrays_(backend.on_gpu() ? *own_arrays_ : *own_grid_),
      stream_(backend.stream()) {
#ifdef GYRE_WITH_CUDA
  if (!backend.on_gpu()) return;
  row_kernels_ = make_cuda_row_kernels(stream_);
  linear_ops_ = make_cuda_linear_ops(stream_, *row_kernels_);
#endif
}

}  // namespace gyre
