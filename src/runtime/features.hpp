#pragma once
// What this build was linked with. Code that only reports, or refuses options, reads these
// constants; code that computes goes through a factory, whose part for a missing library is in the
// file no_LIBRARY.cpp of its module and throws. So only sources of a device (cuda*, nccl*, cublas*,
// cudnn*, *.cu) ask the compiler's definitions, and all others are the same in every build.

namespace gyre {

extern const bool with_cuda;
extern const bool with_nccl;
extern const bool with_cudnn;
/// The device of with_cuda is the software GPU, of softgpu/.
extern const bool software_gpu;

}  // namespace gyre
