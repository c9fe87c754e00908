// Stub of the recurrence on a device for builds without CUDA.

#include "core/error.hpp"
#include "recurrence/cuda_kernel.hpp"

namespace gyre {

std::unique_ptr<RecurrenceKernel> make_cuda_recurrence_kernel(const RecurrenceShape& /*shape*/,
                                                              Stream& /*stream*/,
                                                              int64_t /*scratch*/) {
  throw_runtime("a recurrence on a GPU: this build has no CUDA");
}

}  // namespace gyre
