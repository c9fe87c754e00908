#include "recurrence/kernel.hpp"

#include "core/error.hpp"
#include "recurrence/chunk_kernel.hpp"
#include "recurrence/cuda_kernel.hpp"

namespace gyre {

RecurrenceKernel::RecurrenceKernel(const RecurrenceShape& shape) : shape_(shape) {
  GYRE_CHECK(shape.value_heads % shape.key_heads == 0, "{} value heads, {} key heads",
             shape.value_heads, shape.key_heads);
}

std::unique_ptr<RecurrenceKernel> make_recurrence_kernel(const RecurrenceShape& shape, int threads,
                                                         Stream& stream) {
  if (stream.space() == MemorySpace::device) return make_cuda_recurrence_kernel(shape, stream);
  return std::make_unique<CpuRecurrenceKernel>(shape, threads);
}

}  // namespace gyre
