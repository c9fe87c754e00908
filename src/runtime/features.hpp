#pragma once
// Libraries in this build. Code that only reports or refuses options reads these constants; code
// that computes uses a factory, which throws in the module's no_LIBRARY.cpp if the library is
// missing. Only device sources (cuda*, nccl*, cublas*, cudnn*, *.cu) test the compiler's
// definitions; all others are the same in every build.

namespace gyre {

extern const bool with_cuda;
extern const bool with_nccl;
extern const bool with_cudnn;
/// Whether the device of with_cuda is the software GPU (softgpu/).
extern const bool software_gpu;

}  // namespace gyre
