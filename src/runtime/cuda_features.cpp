#include "runtime/features.hpp"

namespace gyre {
namespace {

constexpr bool nccl =
#ifdef GYRE_WITH_NCCL
    true;
#else
    false;
#endif

constexpr bool cudnn =
#ifdef GYRE_WITH_CUDNN
    true;
#else
    false;
#endif

constexpr bool software =
#ifdef GYRE_SOFTGPU
    true;
#else
    false;
#endif

}  // namespace

const bool with_cuda = true;
const bool with_nccl = nccl;
const bool with_cudnn = cudnn;
const bool software_gpu = software;

}  // namespace gyre
