#pragma once
// What this build was compiled with. Code that only reports, or refuses options, reads these
// constants; code that computes goes through a factory, whose part for a missing library is in the
// file no_LIBRARY.cpp of its module and throws. So no other source asks the compiler's definitions,
// except those that are compiled for one library only (cuda*, nccl*, cudnn*, *.cu).

namespace gyre {

inline constexpr bool with_cuda =
#ifdef GYRE_WITH_CUDA
    true;
#else
    false;
#endif

inline constexpr bool with_nccl =
#ifdef GYRE_WITH_NCCL
    true;
#else
    false;
#endif

inline constexpr bool with_cudnn =
#ifdef GYRE_WITH_CUDNN
    true;
#else
    false;
#endif

/// The device of with_cuda is the software GPU, of softgpu/.
inline constexpr bool software_gpu =
#ifdef GYRE_SOFTGPU
    true;
#else
    false;
#endif

}  // namespace gyre
