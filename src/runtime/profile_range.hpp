#pragma once
// Named NVTX ranges on the timeline of NVIDIA's profilers (Nsight Systems). A range covers what the
// host submits while its ProfileRange exists. Ranges nest, and have a domain of their own, "gyre":
//
//     nsys profile --trace=cuda,nvtx --nvtx-domain-include=gyre gyre-attention ...
//
// Without a profiler a range costs nanoseconds; without CUDA, nothing.

#if defined(GYRE_WITH_CUDA) && !defined(GYRE_SOFTGPU) && __has_include(<nvtx3/nvtx3.hpp>)
#include <nvtx3/nvtx3.hpp>

namespace gyre {

struct NvtxDomain {
  static constexpr char const* name{"gyre"};
};

class ProfileRange {
 public:
  explicit ProfileRange(const char* name) : range_(name) {}

 private:
  nvtx3::scoped_range_in<NvtxDomain> range_;
};

}  // namespace gyre

#else

namespace gyre {

class ProfileRange {
 public:
  explicit ProfileRange(const char* /*name*/) {}
  ~ProfileRange() {}  // NOLINT(modernize-use-equals-default): a variable of it is used
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;
};

}  // namespace gyre

#endif
