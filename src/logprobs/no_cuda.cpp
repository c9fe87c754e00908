// Device functions of log-probabilities in a build without CUDA.

#include "core/error.hpp"
#include "logprobs/fused_linear/fused_linear_cuda.hpp"
#include "logprobs/rows/cuda_row_kernels.hpp"

namespace gyre {

std::unique_ptr<RowKernels> make_cuda_row_kernels(Stream& /*stream*/) {
  throw_runtime("row passes on a GPU: this build has no CUDA");
}

std::unique_ptr<LinearOps> make_cuda_linear_ops(Stream& /*stream*/, RowKernels& /*kernels*/) {
  throw_runtime("the fused linear layer on a GPU: this build has no CUDA");
}

}  // namespace gyre
