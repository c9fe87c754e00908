#pragma once
// Memory of this process, as the kernel counts it.

#include <cstdint>

namespace gyre {

/// Bytes that are resident now, and the most that ever were: VmRSS and VmHWM of /proc/self/status;
/// 0 where there is no such file.
struct ProcessMemory {
  int64_t now_bytes = 0;
  int64_t peak_bytes = 0;
};
ProcessMemory process_memory();

}  // namespace gyre
