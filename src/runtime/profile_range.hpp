#pragma once
// Named NVTX ranges on the timeline of NVIDIA's profilers (Nsight Systems). A range covers the
// host's submissions while its ProfileRange exists. Ranges nest and use the domain "gyre":
//
//     nsys profile --trace=cuda,nvtx --nvtx-domain-include=gyre gyre-attention ...
//
// Without a profiler, and without CUDA, a range costs nanoseconds.

namespace gyre {

class ProfileRange {
 public:
  explicit ProfileRange(const char* name);
  ~ProfileRange();
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;
};

}  // namespace gyre
