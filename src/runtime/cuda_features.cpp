#include "runtime/features.hpp"

namespace gyre {

const bool with_cuda = true;
#ifdef GYRE_WITH_NCCL
const bool with_nccl = true;
#else
const bool with_nccl = false;
#endif
#ifdef GYRE_WITH_CUDNN
const bool with_cudnn = true;
#else
const bool with_cudnn = false;
#endif
#ifdef GYRE_SOFTGPU
const bool software_gpu = true;
#else
const bool software_gpu = false;
#endif

}  // namespace gyre
