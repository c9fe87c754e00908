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
  // NCCL writes 2.28.3 as 22803; before 2.9, the middle number had one digit less.
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
#endif
}

}  // namespace gyre
