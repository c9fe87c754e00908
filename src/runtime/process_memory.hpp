#pragma once
// Memory of this process, as counted by the kernel.

#include <cstdint>

namespace gyre {

/// Resident bytes now and at the peak: VmRSS and VmHWM of /proc/self/status; 0 without that file.
struct ProcessMemory {
  int64_t now_bytes = 0;
  int64_t peak_bytes = 0;
};
ProcessMemory process_memory();

}  // namespace gyre
