#include "comm/nccl_version.hpp"

#include <nccl.h>

#include "core/error.hpp"

namespace gyre {

std::string nccl_version() {
#ifdef GYRE_SOFTGPU
  return "software GPU";
#else
  int version = 0;
  const ncclResult_t result = ncclGetVersion(&version);
  if (result != ncclSuccess) throw_runtime("ncclGetVersion failed: {}", ncclGetErrorString(result));
  // 22803 is 2.28.3; before 2.9 a release had one digit less.
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
#endif
}

}  // namespace gyre
